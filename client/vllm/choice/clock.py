"""Measures the time of steps, on the clock that fits their cost."""

import math
import time
from collections.abc import Callable

WATCHED = 16  # of the steps in which nothing drafts, one in 16 is measured


class StepClock:
    """Measures from the end of one step to the end of the next.

    If the model computes in this process, on its CPU, the clock is CPU time, so that other programs on the machine do
    not count as a cost of drafts. Otherwise it is wall-clock time.

    On a CPU, the first step with a number of tokens takes 1.5 to 3 times as long as later ones: oneDNN compiles
    kernels for this number.
    """

    def __init__(self, computes_here: bool) -> None:
        """`computes_here`: whether the model's forward passes run in this process, on the CPU."""
        self._now: Callable[[], float] = time.process_time if computes_here else time.perf_counter
        self._last = math.inf
        self._compiled: set[int] | None = set() if computes_here else None

    def compiles(self, tokens: int) -> bool:
        """Returns whether a step compiles kernels, because it is the first with this number of tokens."""
        if self._compiled is None or tokens in self._compiled:
            return False
        self._compiled.add(tokens)
        return True

    def lap(self) -> float:
        """Returns the seconds since the last lap; -inf if there was none since the engine was idle."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds

    def idle(self) -> None:
        """Notes that the engine is idle, so that the next lap has no start."""
        self._last = math.inf
