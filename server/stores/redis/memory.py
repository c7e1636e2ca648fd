"""How full Redis is: its own memory and the limit of that, over all servers that take writes."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
import structlog

log = structlog.get_logger()

EVERY = 10.0
"""Seconds from one answer to the next question."""


class Memory:
    """What Redis said last. Redis is asked in a thread of its own, so that no caller waits for a server that is away.

    Args:
        ask: `INFO memory` of every server, as redis-py reads it; raises redis.RedisError.
        clock: seconds that never jump.

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
        """Bytes in use, and the limit. None: Redis has not answered, or has no limit. Asks again where it is time."""
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
        except (redis.RedisError, OSError, LookupError, ValueError) as error:  # away, or not allowed to say
            self._known = (None, None)
            log.debug("Redis does not say how much memory it uses", reason=str(error))
        finally:
            with self._lock:
                self._next = self._clock() + EVERY
                self._asking = False
