"""Keeps a failure of an adapter from stopping its engine."""

import logging
import time
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger("histospec.engines")

QUIET_SECONDS = 60.0  # between two reports of failures


class Harmless:
    """`with harmless("open"):` logs a failure inside, and the engine goes on."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        """Takes what gives up all sessions, for failures that leave their state unknown."""
        self._give_up = give_up
        self._failed = float("-inf")  # the time of the last failure that was logged

    def __call__(self, what: str, forget: bool = False) -> "_Attempt":
        """Logs a failure and goes on. `forget`: also gives up all sessions; their state is unknown."""
        return _Attempt(self, what, forget)

    def failed(self, what: str, error: Exception, forget: bool) -> None:
        """Logs a failure, at most one a minute. `forget`: also gives up all sessions."""
        now = time.monotonic()
        if now - self._failed >= QUIET_SECONDS:
            self._failed = now
            line = "HistoSpec could not %s; the current requests go on without drafts"
            logger.error(line, what, exc_info=error)
        if forget:
            self._give_up()


class _Attempt:
    """A context manager of few instructions: a step enters four of them while the GPU waits."""

    __slots__ = ("_forget", "_harmless", "_what")

    def __init__(self, harmless: Harmless, what: str, forget: bool) -> None:
        self._harmless, self._what, self._forget = harmless, what, forget

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._harmless.failed(self._what, error, self._forget)
        return True
