"""Waiting for what will be the case some time; how long it takes is not what is tested."""

import asyncio
import threading
import time
from collections.abc import Callable

PAUSE = 0.02
UNIT = 0.05
"""Seconds of a million rounds of a loop: twice what they take on an idle core of the machines that run the tests."""


def _slowness() -> float:
    """How many units a million rounds take here and now; at least 1."""
    started = time.perf_counter()
    for _ in range(1_000_000):
        pass
    return max(1.0, (time.perf_counter() - started) / UNIT)


SLOWNESS = min(_slowness() for _ in range(3))
"""What limits of time are multiplied with, so that they detect a hang and no slow machine."""
SECONDS = 60.0 * SLOWNESS
ENGINE_SECONDS = 10 * SECONDS
"""For what an engine in another process does: 30 s alone, minutes where much else runs."""


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
