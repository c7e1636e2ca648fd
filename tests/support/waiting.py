"""Waiting for what will be the case some time; how long it takes is not what is tested."""

import asyncio
import threading
import time
from collections.abc import Callable

SECONDS = 60.0
PAUSE = 0.02


def eventually(
    condition: Callable[[], object], what: str = "it never came true", no: type[Exception] | tuple[()] = ()
) -> None:
    """Returns when the condition is true. `no`: an exception that counts as false."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            if condition():
                return
        except no:
            pass
        if time.monotonic() > until:
            raise AssertionError(what)
        time.sleep(PAUSE)


async def until(condition: Callable[[], object], what: str = "it never came true") -> None:
    """The same for tests in an asyncio loop, which runs on meanwhile."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(PAUSE / 2)


class Latch(threading.Event):
    """An event whose `wait` ends after a minute: a thread that waits for it does not outlive a test that failed."""

    def wait(self, timeout: float | None = SECONDS) -> bool:
        return super().wait(timeout)
