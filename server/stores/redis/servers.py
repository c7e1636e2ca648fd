"""Connections to Redis or Valkey, alone or as a Cluster: many commands in one round trip."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

from histospec.server.stores.redis.location import Location

# Long enough for a server that forks to save its data, short enough to notice one that is gone.
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 5.0
REPLICA_MILLISECONDS = 2000

Command = tuple[Any, ...]
"""The command's name, its key, and further arguments."""

# Errors after which the command may succeed on a retry, perhaps on another server.
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
    """Fewer replicas than required have the write."""


class Servers:
    """The servers that run commands. Thread-safe; connects on first use.

    Calls `where` before every command. New connections use what it returns, such as a new password.
    """

    def __init__(self, where: Callable[[], Location]) -> None:
        self._where = where
        self._location = where()
        self._lock = threading.Lock()
        self._cluster: Any = None  # a redis.cluster.RedisCluster, which is only partly typed
        self._single: redis.Redis | None = None

    def run(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
        """Runs all commands in as few round trips as there are servers. Returns their answers in order.

        With `replicas`, a command succeeds only once as many replicas as the URL says have it.

        Raises:
            redis.RedisError: the first failure; any of the commands may have run.
        """
        location, client = self._client()
        wait = location.replicas if replicas else 0
        if not location.cluster:
            return self._pipeline(client, commands, wait)
        by_node: dict[str, list[int]] = {}
        try:
            for i, command in enumerate(commands):
                by_node.setdefault(client.get_node_from_key(command[1]).name, []).append(i)
            answers: list[Any] = [None] * len(commands)
            for name, mine in by_node.items():
                node = client.get_node(node_name=name)
                some = self._pipeline(client.get_redis_connection(node), [commands[i] for i in mine], wait)
                for i, answer in zip(mine, some, strict=True):
                    answers[i] = answer
        except TRANSIENT:
            self._forget_cluster()  # slots may have moved
            raise
        return answers

    def memory(self) -> list[dict[str, Any]]:
        """Returns `INFO memory` of every server that accepts writes.

        Raises:
            redis.RedisError: a server does not answer, or does not allow this user to ask.
        """
        location, client = self._client()
        if not location.cluster:
            return [client.info("memory")]
        return [client.get_redis_connection(node).info("memory") for node in client.get_primaries()]

    def _client(self) -> tuple[Location, Any]:
        """Returns the current location of the store, and the redis-py client for it."""
        with self._lock:
            location = self._look()
            return location, self._together() if location.cluster else self._alone()

    def _pipeline(self, server: Any, commands: Iterable[Command], wait: int) -> list[Any]:
        pipeline = server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        if wait:
            pipeline.execute_command("WAIT", wait, REPLICA_MILLISECONDS)
        answers = list(pipeline.execute())
        if wait and (have := answers.pop()) < wait:
            raise TooFewReplicas(f"{have} replicas have the write, {wait} are required")
        return answers

    def _look(self) -> Location:
        location = self._where()
        if location != self._location:
            self._location = location
            single, self._single = self._single, None
            if single is not None:
                single.connection_pool.disconnect(inuse_connections=False)  # busy connections finish their commands
            self._forget_cluster()
        return location

    def _options(self) -> dict[str, Any]:
        location = self._location
        options: dict[str, Any] = {
            "username": location.username,
            "password": location.password,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": ANSWER_SECONDS,
            "retry": Retry(NoBackoff(), 0),  # callers retry
        }
        if location.tls:
            options |= {"ssl": True, "ssl_ca_certs": location.ca}
        return options

    def _alone(self) -> redis.Redis:
        single = self._single
        if single is None:
            ((host, port),) = self._location.nodes
            single = self._single = redis.Redis(host, port, self._location.database, **self._options())
        return single

    def _together(self) -> Any:
        cluster = self._cluster
        if cluster is None:
            node: Any = redis.cluster.ClusterNode
            nodes = [node(host, port) for host, port in self._location.nodes]
            try:
                cluster = redis.cluster.RedisCluster(startup_nodes=nodes, **self._options())
            except redis.exceptions.RedisClusterException as error:  # not a subclass of RedisError
                raise _told(error) from error
            self._cluster = cluster
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


def _told(error: BaseException) -> redis.RedisError:
    """Returns why a client could not find its Cluster: the answer of a node, or that no node answered as one."""
    cause = error.__cause__
    if isinstance(cause, redis.AuthenticationError):
        return redis.AuthenticationError(str(cause))
    if cause is not None and "mode is not enabled" in str(cause):
        return redis.ResponseError("this server is not part of a Cluster")
    return redis.ConnectionError(str(cause or error))
