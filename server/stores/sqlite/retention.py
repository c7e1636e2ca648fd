"""Retention in the SQLite store: a thread that checks the clock, and regularly deletes old problems."""

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import structlog

from histospec.server.errors import StoreError
from histospec.server.stores.retention import LOOK_SECONDS, RESUME, TICK_SECONDS, Clock, Trust
from histospec.server.stores.sqlite.writes import Slice, Write, forget_old, old_prompts

log = structlog.get_logger()
T = TypeVar("T")

NOTE_SECONDS = 60.0  # between records of the time in the file


class Retention:
    """Deletes problems `seconds` after their last write.

    Args:
        seconds: more than 0.
        submit: writes to the store.
        connect: opens a connection that reads it.
        slice_: limits the duration of one write.

    """

    def __init__(
        self,
        seconds: float,
        submit: Callable[[Write, int], "Future[Any]"],
        connect: Callable[[], sqlite3.Connection],
        slice_: Slice,
    ) -> None:
        self._seconds = seconds
        self._submit = submit
        self._connect = connect
        self._slice = slice_
        self._clock: Clock | None = None
        self._noted = -math.inf  # wall-clock time of the last record
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)
        self.paused = ""
        self.looked = threading.Event()
        """Runs once."""

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
        self.looked.set()
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
            self._clock.forgot(self._submit(partial(forget_old, self._slice, until), 0).result())

    def _tick(self, note: bool = False) -> None:
        if self._clock is None:
            self._clock = self._submit(partial(_open_clock, self._seconds), 0).result()
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
        self._submit(partial(note_down, trust, self.paused), 0).result()
        self._noted, self.paused = trust.seen, trust.paused

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Reads in a new connection, which blocks neither writers nor readers."""
        try:
            with closing(self._connect()) as connection:
                return query(connection)
        except sqlite3.Error as error:
            raise StoreError(f"store: the times of writes cannot be read: {error}") from error


def _open_clock(seconds: float, connection: sqlite3.Connection) -> Clock:
    (newest,) = connection.execute("SELECT max(latest) FROM writes").fetchone()
    return Clock(seconds, noted(connection), newest)


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
    at: int | None = 0
    while at is not None:
        old, at = old_prompts(connection, until, at)
        yield from old
