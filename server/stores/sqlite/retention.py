"""Deletes old problems, and pauses if the clock that determines their age cannot be trusted.

The wall clock may jump: an empty battery, a wrong time zone, a faulty time server. Then new problems look old. So,
while the server runs, retention compares the wall clock with the machine's monotonic clock. At the start, it compares
the wall clock with the last time that a server recorded. It trusts only times recorded while the clock ran evenly. If
it would delete many problems by other times, or the clock jumped, it pauses until a person has checked
(`histospec forget`).
"""

import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from histospec.server.errors import StoreError
from histospec.server.stores.sqlite.writes import START, Slice, Write, each_prompt, forget_old

log = structlog.get_logger()
T = TypeVar("T")

LOOK_SECONDS = 3600.0  # between searches for old problems, or a tenth of the retention
TICK_SECONDS = 1.0  # between checks of the clock
HOUR = 3600.0
A_FEW = 10  # problems that may be deleted whatever the clock says
BY_FAR = 10  # this many times the deletions of the last hour are suspicious
NOTE_SECONDS = 60.0  # between records of the time in the file

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


class Retention:
    """Deletes problems `seconds` after their last write.

    Args:
        seconds: more than 0.
        submit: writes to the store.
        connect: opens a connection that reads it.
        slice_: limits the duration of one write.
        wall: wall clock in seconds.

    """

    def __init__(
        self,
        seconds: float,
        submit: Callable[[Write], "Future[Any]"],
        connect: Callable[[], sqlite3.Connection],
        slice_: Slice,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wall = wall
        self._seconds = seconds
        self._submit = submit
        self._connect = connect
        self._slice = slice_
        self._clock: Clock | None = None
        self._noted = -math.inf  # wall-clock time of the last record
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)
        self.paused = ""

    def start(self) -> None:
        """Checks at once, and then regularly."""
        self._thread.start()

    def close(self) -> None:
        """Records the time, so that the next start knows how long no server checked the clock."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        every = min(self._seconds / 10, LOOK_SECONDS)
        looked = time.monotonic()
        self._safely(self._look)
        while not self._closing.wait(min(every, TICK_SECONDS)):
            due = time.monotonic() - looked >= every
            if due:
                looked = time.monotonic()
            self._safely(self._look if due else self._tick)
        self._safely(partial(self._tick, True))

    def _safely(self, run: Callable[[], None]) -> None:
        try:
            run()
        except StoreError as error:  # retried at the next interval
            log.warning("old problems are not forgotten", reason=str(error))

    def _look(self) -> None:
        self._tick(True)
        if self.paused or self._clock is None:
            return
        trust = self._clock.trust
        until = trust.seen - self._seconds
        # Times before `since` cannot be trusted. How many of them look old?
        doubtful = self._read(lambda connection: sum(1 for _ in each_old(min(until, trust.since), connection)))
        self._note(self._clock.judge(doubtful))
        if not self.paused:
            self._clock.forgot(self._submit(partial(forget_old, self._slice, until)).result())

    def _tick(self, note: bool = False) -> None:
        if self._clock is None:
            self._clock = self._submit(partial(_open_clock, self._seconds, self._wall)).result()
        before = self._clock.trust
        trust = self._clock.tick()
        if self.paused:
            held = self._read(noted)
            if held is not None and not held.paused:  # a person has confirmed the clock
                log.info("retention goes on", by=RESUME)
                self._clock.resume()
                trust, note = self._clock.trust, True
        if note or trust.paused != before.paused or trust.seen - self._noted > NOTE_SECONDS:
            self._note(trust)

    def _note(self, trust: Trust) -> None:
        if trust.paused and not self.paused:
            log.warning("retention is paused: nothing is forgotten", reason=trust.paused, resume_with=RESUME)
        self._submit(partial(note_down, trust, self.paused)).result()
        self._noted, self.paused = trust.seen, trust.paused

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Reads in a new connection, which blocks neither writers nor readers."""
        try:
            with closing(self._connect()) as connection:
                return query(connection)
        except sqlite3.Error as error:
            raise StoreError(f"store: the times of writes cannot be read: {error}") from error


def _open_clock(seconds: float, wall: Callable[[], float], connection: sqlite3.Connection) -> Clock:
    (newest,) = connection.execute("SELECT max(latest) FROM writes").fetchone()
    return Clock(seconds, noted(connection), newest, wall)


def noted(connection: sqlite3.Connection) -> Trust | None:
    """Returns the last recorded trust."""
    row = connection.execute("SELECT seen, since, forgotten, paused FROM clock").fetchone()
    return Trust(*row) if row else None


def note_down(trust: Trust, paused_before: str, connection: sqlite3.Connection) -> None:
    """Records the trust, unless a person has ended the pause that was recorded before."""
    held = noted(connection)
    if not (paused_before and trust.paused and held is not None and not held.paused):
        connection.execute("REPLACE INTO clock (one, seen, since, forgotten, paused) VALUES (1, ?, ?, ?, ?)", trust)


def each_old(until: float, connection: sqlite3.Connection) -> Iterator[int]:
    """Yields the prompts that `forget_old` would delete."""
    return (place.prompt[-1] for place, old in each_prompt(connection, until, START) if old)
