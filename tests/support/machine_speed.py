"""How slow this machine is, for limits of time that follow its speed."""

import functools
import time

TIMEOUT = 180.0
"""Seconds that a test may take on the reference machine, as `timeout` in pyproject.toml."""
REFERENCE = 0.07  # seconds that the work below takes on two idle cores of an Intel Xeon


@functools.cache
def slowness() -> float:
    """Returns how many times longer work takes here, at present, than on the reference machine; at least 1."""
    start = time.perf_counter()
    total = 0
    for number in range(2_000_000):
        total += number % 7
    return max(1.0, (time.perf_counter() - start) / REFERENCE)
