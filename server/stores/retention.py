"""Forgets what is old, and stops where the clock that says what is old cannot be trusted.

The time of day may jump: a battery that is empty, a wrong time zone, a time server gone mad. What then looks old is
not. So the time of day is compared with the clock of the machine, which only runs on, while the server runs, and with
the time at which a server was last seen when it starts. Times that were noted while the clock went on evenly count.
Where many problems would be forgotten by others, or the clock jumped, retention pauses until a person has looked
(`histospec forget`).
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LOOK_SECONDS = 3600.0  # between looks for what is old, or a tenth of the retention
TICK_SECONDS = 1.0  # between looks at the clock
HOUR = 3600.0
A_FEW = 10  # problems that may be forgotten whatever the clock says
BY_FAR = 10  # times what was forgotten in the last hour is far more

RESUME = "histospec forget"


class Trust(NamedTuple):
    """What the store notes about the clock."""

    seen: float
    """The latest time of day that a server with a retention has seen."""
    since: float
    """From when to `seen` the time of day went on evenly."""
    forgotten: float = 0.0
    """Problems that were forgotten in the hour before `seen`."""
    paused: str = ""
    """Why retention waits for a person, or nothing."""


def tolerance(retention: float) -> float:
    """Seconds that the clock may be wrong: what is forgotten so much too early was nearly old."""
    return min(LOOK_SECONDS, retention / 10)


class Clock:
    """Compares the time of day with a clock that only runs on, and keeps a `Trust`."""

    def __init__(
        self,
        retention: float,
        before: Trust | None,
        newest: float | None,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`before` is what was noted last, `newest` the newest time of a write, each None where there is none."""
        self._tolerance = tolerance(retention)
        self._wall = wall
        self._steady = steady
        self._offset = wall() - steady()
        # When, how many; what was forgotten in the hour before the start counts for the first hour.
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
        """Looks at the clocks."""
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
        """So many were."""
        if problems:
            self._forgotten.append((self._steady(), problems))

    def judge(self, doubtful: int) -> Trust:
        """Pauses where far more than usual would be forgotten whose age no evenly running clock vouches for."""
        usual = self.trust.forgotten
        if doubtful > max(A_FEW, BY_FAR * usual) and not self.trust.paused:
            why = f"{doubtful} problems look old at once, after {usual:.0f} in the last hour"
            self.trust = self.trust._replace(paused=f"{why}: has the time of day jumped?")
        return self.trust

    def resume(self) -> None:
        """A person has looked."""
        self._offset = self._wall() - self._steady()
        self.trust = self.trust._replace(since=-math.inf, paused="")


def _days(seconds: float) -> str:
    seconds = abs(seconds)
    return f"{seconds / 86_400:.1f} days" if seconds > 86_400 else f"{seconds / 3600:.1f} hours"
