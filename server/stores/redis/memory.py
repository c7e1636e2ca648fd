"""The memory use of Redis and its limit, summed over all servers that accept writes."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
import structlog

log = structlog.get_logger()

EVERY = 10.0
"""Seconds between requests."""


class Memory:
    """The last answer of Redis. A separate thread asks, so that no caller waits for an unreachable server.

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
        except (redis.RedisError, OSError, LookupError, ValueError) as error:  # unreachable, or not allowed to answer
            self._known = (None, None)
            log.debug("Redis does not report its memory", reason=str(error))
        finally:
            with self._lock:
                self._next = self._clock() + EVERY
                self._asking = False
