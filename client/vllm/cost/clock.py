"""The time of steps, on the clock that says what they cost."""

import math
import time
from collections.abc import Callable


class StepClock:
    """From the end of one step to the end of the next.

    Where the model computes in this process, on its CPU, that is CPU time: what other programs take of the machine is
    no cost of a draft. Elsewhere it is the clock on the wall.
    """

    def __init__(self, computes_here: bool) -> None:
        """`computes_here`: whether the model's forward passes run in this process, on the CPU."""
        self._now: Callable[[], float] = time.process_time if computes_here else time.perf_counter
        self._last = math.inf

    def lap(self) -> float:
        """Seconds since the last lap; -inf where none was taken since the engine idled."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds

    def idle(self) -> None:
        """The engine has nothing to do: the next lap has no beginning."""
        self._last = math.inf
