"""Connections to Redis or Valkey, alone or as a Cluster: many commands in one round trip, and their memory."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import redis.cluster
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from histospec.server.errors import ConfigError, StoreError, StoreFull
from histospec.server.stores.interface import Reader
from histospec.server.stores.opening import Progress
from histospec.server.stores.redis.location import Location

log = structlog.get_logger()

# Long enough for a server that forks to save its data, short enough to notice one that is gone.
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 5.0
REPLICA_SECONDS = 2.0
FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0  # seconds between tries to reach a server; the pause doubles
LOG_SECONDS = 60.0  # between two log lines about one outage
MEMORY_SECONDS = 10.0  # between two requests for the memory in use
SCANNED = 1000  # keys that a server looks at before it lets others run commands
SAFE = "noeviction"  # the `maxmemory-policy` that never deletes what was written

Command = tuple[Any, ...]
"""The command's name, its key, and further arguments; for EVAL the script, the number 1, the key, and arguments."""

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

    Calls `where` before every command. New connections use what it returns, such as a new password. `answer_seconds`
    limits the wait for an answer, `replica_seconds` that for a replica.
    """

    def __init__(
        self,
        where: Callable[[], Location],
        answer_seconds: float = ANSWER_SECONDS,
        replica_seconds: float = REPLICA_SECONDS,
    ) -> None:
        self._where = where
        self._answer_seconds = answer_seconds
        self._replica_milliseconds = int(1000 * replica_seconds)
        self._location = where()
        self._lock = threading.Lock()
        self._client: Any = None  # a redis.Redis or a redis.cluster.RedisCluster, which is only partly typed

    def run(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
        """Runs all commands in as few round trips as there are servers. Returns their answers in order.

        With `replicas`, a command succeeds only once as many replicas as the URL says have it.

        Raises:
            redis.RedisError: the first failure; any of the commands may have run.
        """
        answers = self.each(commands, replicas)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def each(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
        """Runs commands as `run` does. The answer of a command that failed is its redis.RedisError.

        Raises:
            redis.RedisError: the servers are not known.
        """
        with self._hidden_password():
            answers = self._each(commands, replicas)
        for answer in answers:
            if isinstance(answer, redis.RedisError):
                self._hide_password(answer)
        return answers

    def _each(self, commands: Sequence[Command], replicas: bool) -> list[Any]:
        location, client = self._connected()
        wait = location.replicas if replicas else 0
        answers = (self._on_nodes if location.cluster else self._pipeline)(client, commands, wait)
        if any(isinstance(answer, TRANSIENT) for answer in answers):
            self._disconnect()  # another server may be the primary by now
        return answers

    def _on_nodes(self, client: Any, commands: Sequence[Command], wait: int) -> list[Any]:
        """Runs every command on the node of the Cluster that has its key."""
        by_node: dict[str, list[int]] = {}
        answers: list[Any] = [None] * len(commands)
        for i, command in enumerate(commands):
            try:
                by_node.setdefault(client.get_node_from_key(_key(command)).name, []).append(i)
            except redis.RedisError as error:  # noqa: PERF203 - no server has its slot
                answers[i] = error
        for name, mine in by_node.items():
            node = client.get_node(node_name=name)
            some = self._pipeline(client.get_redis_connection(node), [commands[i] for i in mine], wait)
            for i, answer in zip(mine, some, strict=True):
                answers[i] = answer
        return answers

    def keys(self, pattern: bytes) -> Iterator[list[bytes]]:
        """Yields the keys that match, some at a time. A key may come twice.

        Raises:
            redis.RedisError: a server does not answer.
        """
        location, client = self._connected()
        nodes = [client.get_redis_connection(node) for node in client.get_primaries()] if location.cluster else [client]
        for node in nodes:
            cursor = 0
            while True:
                try:
                    with self._hidden_password():
                        cursor, found = node.scan(cursor, match=pattern, count=SCANNED)
                except TRANSIENT:
                    self._disconnect()  # another server may be the primary by now
                    raise
                yield found
                if not cursor:
                    break

    def memory(self) -> list[dict[str, Any]]:
        """Returns `INFO memory` of every server that accepts writes.

        Raises:
            redis.RedisError: a server does not answer, or does not allow this user to ask.
        """
        with self._hidden_password():
            location, client = self._connected()
            if not location.cluster:
                return [client.info("memory")]
            return [client.get_redis_connection(node).info("memory") for node in client.get_primaries()]

    @contextmanager
    def _hidden_password(self) -> Iterator[None]:
        """Removes the password from errors: an old server or a proxy quotes the command that it refuses."""
        try:
            yield
        except redis.RedisError as error:
            self._hide_password(error)
            raise

    def _hide_password(self, error: redis.RedisError) -> None:
        error.args = tuple(self._location.without_password(one) for one in error.args)

    def _connected(self) -> tuple[Location, Any]:
        """Returns the current location of the store, and the redis-py client for it."""
        with self._lock:
            location = self._where()
            if location != self._location:
                self._location = location
                self._disconnect()
            if self._client is None:
                self._client = self._connect(location)
            return location, self._client

    def _pipeline(self, server: Any, commands: Sequence[Command], wait: int) -> list[Any]:
        pipeline = server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        if wait:
            pipeline.execute_command("WAIT", wait, self._replica_milliseconds)
        try:
            answers = list(pipeline.execute(raise_on_error=False))
        except redis.RedisError as error:  # the server does not answer
            return [error] * len(commands)
        if wait and (few := _too_few(answers.pop(), wait)):
            return [answer if isinstance(answer, Exception) else few for answer in answers]
        return answers

    def _connect(self, location: Location) -> Any:
        options: dict[str, Any] = {
            "username": location.username,
            "password": location.password,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": self._answer_seconds,
            "retry": Retry(NoBackoff(), 0),  # callers retry
        }
        if location.tls:
            options |= {"ssl": True, "ssl_ca_certs": location.ca}
        if not location.cluster:
            ((host, port),) = location.nodes
            return redis.Redis(host, port, location.database, **options)
        node: Any = redis.cluster.ClusterNode
        nodes = [node(host, port) for host, port in location.nodes]
        try:
            return redis.cluster.RedisCluster(startup_nodes=nodes, **options)
        except redis.exceptions.RedisClusterException as error:  # not a subclass of RedisError
            raise _no_cluster(error) from error

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        nodes = [node.redis_connection for node in client.get_nodes()] if hasattr(client, "get_nodes") else [client]
        for node in nodes:
            if node is not None:
                node.connection_pool.disconnect(inuse_connections=False)  # busy connections finish their commands

    def close(self) -> None:
        """Closes the connections."""
        self._disconnect()


def _key(command: Command) -> Any:
    return command[3] if command[0] == "EVAL" else command[1]


def _too_few(have: Any, wanted: int) -> redis.RedisError | None:
    """Returns why the answer of WAIT does not acknowledge the write."""
    if isinstance(have, redis.RedisError):
        # A server that has become a replica since the write. Other errors, such as a missing right, stay.
        return TooFewReplicas(str(have)) if "replica instances" in str(have) else have
    return TooFewReplicas(f"{have} replicas have the write, {wanted} are required") if have < wanted else None


def _no_cluster(error: BaseException) -> redis.RedisError:
    """Returns why a client could not find its Cluster: the answer of a node, or that no node answered as one."""
    cause = error.__cause__
    if isinstance(cause, redis.AuthenticationError):
        return redis.AuthenticationError(str(cause))
    if cause is not None and "mode is not enabled" in str(cause):
        return redis.ResponseError("this server is not part of a Cluster")
    return redis.ConnectionError(str(cause or error))


class Memory:
    """The memory in use and its limit, summed over all servers that accept writes, as Redis last answered.

    A separate thread asks, so that no caller waits for an unreachable server.

    Args:
        ask: runs `INFO memory` on every server, as redis-py returns it; raises redis.RedisError.
        clock: monotonic clock in seconds.

    """

    def __init__(
        self, ask: Callable[[], Sequence[Mapping[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._asking = False
        self._known: tuple[int | None, int | None] = (None, None)
        self.evicts = ""
        """The `maxmemory-policy` of a server that deletes keys when it is full; empty if there is none."""
        self.outage = ""
        """Why Redis did not answer; empty if it did."""

    def look(self) -> tuple[int | None, int | None]:
        """Returns the bytes in use and the limit; None if Redis has not answered or has no limit. May ask again."""
        with self._lock:
            due = not self._asking and self._clock() >= self._next
            self._asking = self._asking or due
        if due:
            threading.Thread(target=self._look, name="redis-memory", daemon=True).start()
        return self._known

    def _look(self) -> None:
        try:
            answers = self._ask()
            used, limits = ([int(answer[key]) for answer in answers] for key in ("used_memory", "maxmemory"))
            self._known = sum(used), sum(limits) if all(limits) else None
            policies = (str(answer.get("maxmemory_policy", SAFE)) for answer in answers)
            evicts = next((policy for policy in policies if policy != SAFE), "")
            if evicts and not self.evicts:
                log.warning("Redis deletes stored responses when it is full; set noeviction", maxmemory_policy=evicts)
            self.evicts = evicts
            self.outage = ""
        except (redis.RedisError, OSError, LookupError, ValueError) as error:  # unreachable, or not allowed to answer
            self._known = (None, None)
            away = isinstance(error, TRANSIENT)
            self.outage = f"Redis does not answer ({error}); it is asked again every few seconds" if away else ""
            log.debug("Redis does not report its memory", reason=str(error))
        finally:
            with self._lock:
                self._next = self._clock() + MEMORY_SECONDS
                self._asking = False


def reach(store: Reader, where: Callable[[], Location], url_may_change: bool, progress: Progress) -> dict[str, int]:
    """Reads the newest epochs of a store as soon as it answers.

    Args:
        store: in Redis.
        where: returns the current location, for messages.
        url_may_change: whether a rejected password may still be replaced.
        progress: receives what is being waited for.

    Raises:
        ConfigError: Redis answers, and can never do what is needed; the message says why.
        GivenUp: as `progress` does.

    """
    started = time.monotonic()
    logged: float | None = None
    pause = FIRST_PAUSE
    progress.report(f"connecting to {where()}")
    while True:
        try:
            newest = store.newest_epochs()
            break
        except StoreError as error:
            why = error.__cause__ or error
            if not comes_back(why, url_may_change):
                advice = "give the URL of a server that accepts it"
                if isinstance(why, redis.AuthenticationError):
                    advice = "give a valid user and password, redis://USER:PASSWORD@HOST:PORT"
                raise ConfigError(f"--store {where()}: {why}; {advice}") from None
        now = time.monotonic()
        if logged is None or now - logged >= LOG_SECONDS:
            logged = now
            text = "the store does not answer; the server drafts from running sessions and retries"
            log.warning(text, store=str(where()), reason=str(why), seconds=round(now - started))
        progress.report(f"{where()} does not answer ({why}), trying again")
        progress.wait(pause)
        pause = min(2 * pause, LAST_PAUSE)
    if logged is not None:
        log.info("the store answers", store=str(where()), seconds=round(time.monotonic() - started))
    return newest


def comes_back(error: BaseException, url_may_change: bool) -> bool:
    """Returns whether the same request may succeed later, with the same URL or a replaced one."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return url_may_change
    return isinstance(error, TRANSIENT)


def is_about_its_key(error: Exception) -> bool:
    """Returns whether the command failed because its key has another type."""
    return isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE")


def explain(error: Exception) -> StoreError:
    """Returns the error that a caller gets."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreFull(f"store: the Redis server is full ({error}); the request is refused")
    if "No space left on device" in str(error):
        return StoreFull(f"store: the disk of the Redis server is full ({error}); the request is refused")
    return StoreError(f"store: {error}; the request is refused")
