"""Waiting for what will be the case some time; how long it takes is not what is tested."""

import time
from collections.abc import Callable

SECONDS = 60.0


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
        time.sleep(0.02)
