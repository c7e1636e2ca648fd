"""Connections to Redis or Valkey, alone or as a Cluster: many commands in one round trip."""

from collections.abc import Iterable, Sequence
from typing import Any

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

from histospec.server.stores.redis.location import Location

# Long enough for a server that forks to save itself, short enough to notice one that is gone.
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 5.0
REPLICA_MILLISECONDS = 2000

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

    def memory(self) -> list[dict[str, Any]]:
        """`INFO memory` of every server that takes writes.

        Raises:
            redis.RedisError: one does not answer, or does not let this user ask.
        """
        if not self.location.cluster:
            return [self._alone().info("memory")]
        cluster = self._together()
        return [cluster.get_redis_connection(node).info("memory") for node in cluster.get_primaries()]

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
