"""Connections to Redis or Valkey, alone or as a Cluster: where a URL leads, and many commands in one round trip.

    redis://[user:password@]host:port[/database]        one server; rediss:// over TLS
    redis+cluster://[user:password@]host:port,host:port Cluster, found from any of its nodes; rediss+cluster:// over TLS

`?replicas=1` has a write count only once so many replicas have it, so that it survives the loss of their master.
`?ca=FILE` is who may have signed the servers' certificates, where that is not one of the system's.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

# Long enough for a server that forks to save itself, short enough to notice one that is gone.
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 5.0
REPLICA_MILLISECONDS = 2000

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")

Command = tuple[Any, ...]
"""Its name, its key, and what follows."""

# The command may do better when it is sent again, perhaps elsewhere.
TRANSIENT = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ClusterError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.AskError,
    redis.exceptions.MovedError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.MasterDownError,
    redis.exceptions.BusyLoadingError,
)


class TooFewReplicas(redis.ConnectionError):
    """The write is on fewer replicas than asked for."""


class Location(NamedTuple):
    """A checked URL."""

    nodes: tuple[tuple[str, int], ...]
    cluster: bool
    tls: bool
    ca: str | None
    username: str | None
    password: str | None
    database: int
    replicas: int

    @classmethod
    def parse(cls, url: str) -> "Location":
        """Raises ValueError with a sentence that does not repeat the password."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"a Redis store starts with one of {', '.join(f'{s}://' for s in SCHEMES)}")
        who, _, where = parts.netloc.rpartition("@")
        username, _, password = who.partition(":")
        options = parse_qs(parts.query)
        if unknown := options.keys() - {"replicas", "ca"}:
            raise ValueError(f"unknown option {min(unknown)!r}; known are replicas and ca")
        replicas = options.get("replicas", ["0"])[-1]
        database = parts.path.strip("/") or "0"
        cluster = parts.scheme.endswith("+cluster")
        if not replicas.isdecimal():
            raise ValueError(f"replicas: expected a number, got {replicas!r}")
        if not database.isdecimal() or (cluster and database != "0"):
            raise ValueError(f"database: expected {'0, the only one of a Cluster' if cluster else 'a number'}")
        nodes = tuple(_node(node) for node in where.split(","))
        if not cluster and len(nodes) > 1:
            raise ValueError("several servers are a Cluster: redis+cluster://")
        return cls(
            nodes, cluster, parts.scheme.startswith("rediss"), options.get("ca", [None])[-1], unquote(username) or None,
            unquote(password) or None, int(database), int(replicas),
        )  # fmt: skip

    def __str__(self) -> str:
        """Without secrets."""
        nodes = ",".join(f"{host}:{port}" for host, port in self.nodes)
        return f"redis{'s' * self.tls}{'+cluster' * self.cluster}://{nodes}/{self.database}"


def _node(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, "6379"
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is not of the form host:port")
    return host.strip("[]"), int(port)


class Servers:
    """Where commands go. Thread-safe; connects when it is first used."""

    def __init__(self, location: Location) -> None:
        self.location = location
        options: dict[str, Any] = {
            "username": location.username,
            "password": location.password,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": ANSWER_SECONDS,
            "retry": Retry(NoBackoff(), 0),  # who asks knows how patient to be
        }
        if location.tls:
            options |= {"ssl": True, "ssl_ca_certs": location.ca}
        self._options = options
        self._cluster: Any = None  # of redis.cluster.RedisCluster, which is typed in part
        self._single: redis.Redis | None = None

    def run(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
        """All commands in as few round trips as there are servers; their answers, in order.

        With `replicas` they count once as many replicas as the URL asks for have them.

        Raises:
            redis.RedisError: the first failure; any of the commands may have been carried out.
        """
        wait = self.location.replicas if replicas else 0
        if not self.location.cluster:
            return self._pipeline(self._alone(), commands, wait)
        cluster = self._together()
        by_node: dict[str, list[int]] = {}
        try:
            for i, command in enumerate(commands):
                by_node.setdefault(cluster.get_node_from_key(command[1]).name, []).append(i)
            answers: list[Any] = [None] * len(commands)
            for name, mine in by_node.items():
                node = cluster.get_node(node_name=name)
                some = self._pipeline(cluster.get_redis_connection(node), [commands[i] for i in mine], wait)
                for i, answer in zip(mine, some, strict=True):
                    answers[i] = answer
        except TRANSIENT:
            self._forget_cluster()  # who owns what may have changed
            raise
        return answers

    def _pipeline(self, server: Any, commands: Iterable[Command], wait: int) -> list[Any]:
        pipeline = server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        if wait:
            pipeline.execute_command("WAIT", wait, REPLICA_MILLISECONDS)
        answers = list(pipeline.execute())
        if wait and (have := answers.pop()) < wait:
            raise TooFewReplicas(f"{have} replicas have the write, {wait} were asked for")
        return answers

    def _alone(self) -> redis.Redis:
        if self._single is None:
            ((host, port),) = self.location.nodes
            self._single = redis.Redis(host, port, self.location.database, **self._options)
        return self._single

    def _together(self) -> Any:
        cluster = self._cluster
        if cluster is None:
            node: Any = redis.cluster.ClusterNode
            nodes = [node(host, port) for host, port in self.location.nodes]
            cluster = self._cluster = redis.cluster.RedisCluster(startup_nodes=nodes, **self._options)
        return cluster

    def _forget_cluster(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def close(self) -> None:
        """Closes the connections."""
        self._forget_cluster()
        if self._single is not None:
            self._single.close()
