"""Counts stored responses that differ from what was written."""

import threading
from collections.abc import Hashable

import structlog

from histospec.server.logs.lines import Throttle

log = structlog.get_logger()

REMEMBERED = 100_000  # damaged responses, so that rereading one does not count it again


class Damage:
    """Counts damaged responses. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()
        self._throttle = Throttle(10, 60.0)
        self.responses = 0

    def found(self, which: Hashable, reason: str) -> None:
        """Counts a response that is left out; `which` identifies it."""
        with self._lock:
            if which in self._seen:
                return
            if len(self._seen) < REMEMBERED:
                self._seen.add(which)
            self.responses += 1
            left_out = self._throttle.admits("damaged")
        if left_out is not None:
            log.error("a stored response is damaged and left out", reason=reason, **left_out)

    def lost(self, responses: int) -> None:
        """Counts responses that could not even be read."""
        with self._lock:
            self.responses += responses
