"""Counts the stored responses that are not what was written."""

import threading
from collections.abc import Hashable

import structlog

from histospec.server.logs.lines import Throttle

log = structlog.get_logger()

REMEMBERED = 100_000  # so that a response that is read again is not counted again


class Damage:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()
        self._throttle = Throttle(10, 60.0)
        self.responses = 0

    def found(self, which: Hashable, reason: str) -> None:
        """A response is left out; `which` names it."""
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
        """So many more were not even readable."""
        with self._lock:
            self.responses += responses
