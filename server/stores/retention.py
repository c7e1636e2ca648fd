"""Deletes old problems, and pauses if the clock that determines their age cannot be trusted.

The wall clock may jump: an empty battery, a wrong time zone, a faulty time server. Then new problems look old. So,
while the server runs, retention compares the wall clock with the machine's monotonic clock. At the start, it compares
the wall clock with the last time that a server recorded. It trusts only times recorded while the clock ran evenly. If
it would delete many problems by other times, or the clock jumped, it pauses until a person has checked
(`histospec forget`).
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LOOK_SECONDS = 3600.0  # between searches for old problems, or a tenth of the retention
TICK_SECONDS = 1.0  # between checks of the clock
HOUR = 3600.0
A_FEW = 10  # problems that may be deleted whatever the clock says
BY_FAR = 10  # this many times the deletions of the last hour are suspicious

RESUME = "histospec forget"


class Trust(NamedTuple):
    """What the store records about the clock."""

    seen: float
    """The latest wall-clock time that a server with retention has seen."""
    since: float
    """The wall clock ran evenly from this time to `seen`."""
    forgotten: float = 0.0
    """Problems deleted in the hour before `seen`."""
    paused: str = ""
    """Why retention waits for a person; empty if it does not."""


def tolerance(retention: float) -> float:
    """Returns the allowed clock error in seconds: a problem deleted that much too early was nearly old."""
    return min(LOOK_SECONDS, retention / 10)


class Clock:
    """Compares the wall clock with a monotonic clock, and maintains a `Trust`."""

    def __init__(
        self,
        retention: float,
        before: Trust | None,
        newest: float | None,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`before`: the last recorded trust. `newest`: the newest time of a write. None if there is none."""
        self._tolerance = tolerance(retention)
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()
        # (time, number). Deletions in the hour before the start count for the first hour.
        self._forgotten: deque[tuple[float, float]] = deque([(steady(), before.forgotten)] if before else [])
        now = wall()
        gap = now - max(
            -math.inf if newest is None else newest,
            before.seen if before else -math.inf,
        )
        paused = before.paused if before else ""
        if gap < -self._tolerance:
            paused = paused or f"the time of day is {_days(-gap)} before what a server has seen already"
        trusted = before is not None and abs(now - before.seen) <= self._tolerance
        self.trust = Trust(now, before.since if before and trusted else now, before.forgotten if before else 0, paused)

    def tick(self) -> Trust:
        """Compares the clocks. Returns the new trust."""
        now, steady = self._wall(), self._steady()
        jump = now - steady - self._offset
        trust = self.trust._replace(seen=now, forgotten=self._last_hour(steady))
        if abs(jump) > self._tolerance:
            self._offset = now - steady
            way = "forward" if jump > 0 else "back"
            trust = trust._replace(since=now, paused=trust.paused or f"the time of day jumped {way} by {_days(jump)}")
        self.trust = trust
        return trust

    def _last_hour(self, steady: float) -> float:
        while self._forgotten and self._forgotten[0][0] < steady - HOUR:
            self._forgotten.popleft()
        return float(sum(number for _, number in self._forgotten))

    def forgot(self, problems: int) -> None:
        """Records that problems were deleted."""
        if problems:
            self._forgotten.append((self._steady(), problems))

    def judge(self, doubtful: int) -> Trust:
        """Pauses if far more problems than usual would be deleted by times that cannot be trusted."""
        usual = self.trust.forgotten
        if doubtful > max(A_FEW, BY_FAR * usual) and not self.trust.paused:
            why = f"{doubtful} problems look old at once, after {usual:.0f} in the last hour"
            self.trust = self.trust._replace(paused=f"{why}: has the time of day jumped?")
        return self.trust

    def resume(self) -> None:
        """Ends a pause, because a person has checked the clock."""
        self._offset = self._wall() - self._steady()
        self.trust = self.trust._replace(since=-math.inf, paused="")


def _days(seconds: float) -> str:
    seconds = abs(seconds)
    return f"{seconds / 86_400:.1f} days" if seconds > 86_400 else f"{seconds / 3600:.1f} hours"
