"""Keeps a failure of an adapter from stopping its engine."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("histospec.engines")

QUIET_SECONDS = 60.0  # between two reports of failures


class Harmless:
    """`with harmless("open"):` logs a failure inside, and the engine goes on."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """Takes what gives up all sessions, for failures that leave their state unknown."""
        self._give_up = give_up
        self._failed = float("-inf")  # the time of the last failure that was logged

    @contextmanager
    def __call__(self, what: str, forget: bool = False) -> Iterator[None]:
        """Logs a failure and goes on. `forget`: also gives up all sessions; their state is unknown."""
        try:
            yield
        except Exception:
            now = time.monotonic()
            if now - self._failed >= QUIET_SECONDS:
                self._failed = now
                logger.exception("HistoSpec could not %s; the current requests go on without drafts", what)
            if forget:
                self._give_up()
