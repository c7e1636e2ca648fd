"""Writes to the SQLite store, in pieces that each take little time.

All others wait for a transaction. So a write that may take long, because it deletes much, watches the clock, stops when
its time is up, and returns `Again` with the rest for another transaction. A drop or a rewind is recorded first
(`leaving`): from then on readers no longer see the rows, and after a crash, the next start finishes the deletion.
"""

import sqlite3
import time
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from histospec.protocol.placement import problem_digest
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.records import COLUMNS, to_row
from histospec.server.stores.sqlite.database import digest_of
from histospec.server.stores.sqlite.reader import STAYS, marks, prompts_of

SLICE_SECONDS = 0.02
DELETED_AT_ONCE = 32  # responses between two checks of the clock
LISTED_AT_ONCE = 500  # prompts
KNOWN_PROBLEMS = 50_000
KNOWN_RESPONSES = 8_000_000  # of problems with a name, 8 bytes each

Write = Callable[[sqlite3.Connection], Any]


class Again(NamedTuple):
    """The result of an unfinished write: the rest of it."""

    rest: Write


class Slice:
    """The time that all long writes of one transaction may take together."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self) -> None:
        """Marks the start of a transaction."""
        self._until = time.monotonic() + SLICE_SECONDS

    def over(self) -> bool:
        """Returns whether the rest must wait for another transaction."""
        return time.monotonic() >= self._until


class Prompts:
    """The prompt of each response of a named problem: by epoch, and within an epoch in the order of arrival."""

    def __init__(self, held: Iterable[tuple[int, int]]) -> None:
        """`held`: epoch and prompt of each response, ordered by epoch."""
        of_epoch = groupby(held, key=itemgetter(0))
        self._held = {epoch: array("q", (prompt for _, prompt in some)) for epoch, some in of_epoch}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def counts(self) -> Iterable[tuple[int, int]]:
        """Returns the epochs, and how many responses each has."""
        return ((epoch, len(prompts)) for epoch, prompts in self._held.items())

    def add(self, epoch: int, prompt: int) -> None:
        """Adds a response."""
        self._held.setdefault(epoch, array("q")).append(prompt)

    def remove_oldest(self, epoch: int, number: int) -> set[int]:
        """Removes the oldest responses of an epoch. Returns their prompts."""
        held = self._held[epoch]
        prompts = set(held[:number])
        del held[:number]
        if not held:
            del self._held[epoch]
        return prompts


class Window:
    """The number of responses that a problem has of each epoch, and which of new ones to keep.

    A call costs time only for what it adds and removes. With `prompts`, also knows the prompts of the responses.
    """

    def __init__(self, counts: Iterable[tuple[int, int]], prompts: Prompts | None = None) -> None:
        self.prompts = prompts
        self._counts = dict(counts)
        self._epochs = sorted(self._counts)
        self._total = sum(self._counts.values())

    @property
    def known(self) -> int:
        """The number of responses whose prompts it knows."""
        return len(self.prompts) if self.prompts is not None else 0

    def add(self, records: Iterable[Record], prompt: int = 0) -> None:
        """Adds records of one prompt."""
        for record in records:
            if record.epoch not in self._counts:
                insort(self._epochs, record.epoch)
                self._counts[record.epoch] = 0
            self._counts[record.epoch] += 1
            self._total += 1
            if self.prompts is not None:
                self.prompts.add(record.epoch, prompt)

    def remove_oldest(self, number: int) -> list[tuple[int, int, set[int]]]:
        """Removes the oldest responses. Returns their epochs, how many of each, and their prompts where known."""
        removed: list[tuple[int, int, set[int]]] = []
        while number and self._epochs:
            oldest = self._epochs[0]
            some = min(number, self._counts[oldest])
            prompts = set() if self.prompts is None else self.prompts.remove_oldest(oldest, some)
            removed.append((oldest, some, prompts))
            number -= some
            self._total -= some
            self._counts[oldest] -= some
            if not self._counts[oldest]:
                del self._counts[oldest]
                del self._epochs[0]
        return removed

    def admit(self, records: Sequence[Record], epochs: int, responses: int, slack: int) -> tuple[list[Record], int]:
        """Returns the records to add, by epoch, and how many of the oldest responses to remove.

        Keeps the newest `epochs`, and if there are more than `responses + slack`, only the newest `responses`.
        """
        new = {record.epoch for record in records} - self._counts.keys()
        first = sorted([*self._epochs[-epochs:], *new])[-epochs:][0] if self._epochs or new else 0
        stay = sorted((record for record in records if record.epoch >= first), key=lambda record: record.epoch)
        leave = sum(self._counts[epoch] for epoch in self._epochs[: bisect_left(self._epochs, first)])
        excess = self._total - leave + len(stay) - responses
        if excess > slack:
            # Removal order: by epoch, and within an epoch held responses before new ones.
            at = bisect_left(self._epochs, first)
            while excess and (stay or at < len(self._epochs)):
                if at < len(self._epochs) and (not stay or self._epochs[at] <= stay[0].epoch):
                    some = min(excess, self._counts[self._epochs[at]])
                    leave, excess, at = leave + some, excess - some, at + 1
                else:
                    stay, excess = stay[1:], excess - 1
        return stay, leave


class Appender:
    """Adds responses; keeps the newest `epochs` of each problem, and of these the newest `responses`.

    Remembers the number of responses of each problem and epoch, so that the cost of a write does not depend on it, and
    the newest epoch of each namespace. A named problem may come with a new prompt every time: of its responses it also
    remembers the prompts, so that the oldest need not be searched among all. It notices other writes through the same
    connection. Call `forget` after a failed write, or a write through another connection.
    """

    def __init__(self, epochs: int, responses: int, slice_: Slice) -> None:
        self._epochs = epochs
        self._responses = responses
        self._slice = slice_
        self._windows: OrderedDict[bytes, Window] = OrderedDict()  # by digest: a prompt may have megabytes
        self._known = 0  # responses of the windows whose prompts are known
        self._newest: dict[str, int] = {}
        self._changes = 0  # the connection's total_changes after the last batch

    def forget(self) -> None:
        """Clears what it remembers, because the file may have changed."""
        self._windows.clear()
        self._known = 0
        self._newest.clear()

    def append(self, connection: sqlite3.Connection, batch: ResponseBatch, too_old: int = 0) -> "Again | int":
        """Adds a batch. Returns how many of its responses are too old to keep, and `too_old`.

        Deletes old responses first: if the file may not grow, the new ones take their place.
        """
        if connection.total_changes != self._changes:  # retention or a drop has written
            self.forget()
        finished, kept = self._append(connection, batch)
        self._changes = connection.total_changes
        too_old += len(batch.records) - kept
        if finished:
            return too_old
        return Again(partial(self.append, batch=ResponseBatch(batch.problem, []), too_old=too_old))

    def _append(self, connection: sqlite3.Connection, batch: ResponseBatch) -> tuple[bool, int]:
        """Returns whether all old responses are deleted, and how many of the batch it has added."""
        problem = batch.problem
        key = (problem.namespace, problem.name, digest_of(problem.prompt), problem.prompt)
        row = connection.execute(
            "SELECT id FROM prompts WHERE namespace = ? AND problem = ? AND digest = ? AND tokens = ?", key
        ).fetchone()
        prompt = int(row[0]) if row else None
        window = self._window(connection, problem, prompt)
        # With several prompts, the oldest responses of an epoch must be sorted, so this is not done with every write.
        slack = self._responses // 8 if problem.name else 0
        records, leave = window.admit(batch.records, self._epochs, self._responses, slack)
        known = window.known
        finished = self._delete_oldest(connection, problem.namespace, window, leave, prompt, bool(records))
        if records:
            if prompt is None:
                insert = "INSERT INTO prompts (namespace, problem, digest, tokens) VALUES (?, ?, ?, ?)"
                prompt = connection.execute(insert, key).lastrowid or 0
            self._insert(connection, problem.namespace, prompt, records)
            window.add(records, prompt)
        self._known += window.known - known
        self._forget_some()
        return finished, len(records)

    def _window(self, connection: sqlite3.Connection, problem: Problem, prompt: int | None) -> Window:
        key = problem_digest(*problem)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = self._read(connection, problem, prompt)
            self._known += window.known
        self._windows.move_to_end(key)
        return window

    @staticmethod
    def _read(connection: sqlite3.Connection, problem: Problem, prompt: int | None) -> Window:
        among, parameters = prompts_of(problem)
        held, key = f"FROM responses WHERE prompt IN ({among}) AND {STAYS}", (*parameters, problem.namespace)
        if not problem.name:
            counts = f"SELECT epoch, count(*) {held} GROUP BY epoch"
            return Window(connection.execute(counts, key) if prompt is not None else ())
        prompts = Prompts(connection.execute(f"SELECT epoch, prompt {held} ORDER BY epoch, id", key))
        return Window(prompts.counts(), prompts)

    def _forget_some(self) -> None:
        """Clears the windows that were used least recently, beyond the bounds."""
        while len(self._windows) > KNOWN_PROBLEMS or (self._known > KNOWN_RESPONSES and len(self._windows) > 1):
            self._known -= self._windows.popitem(last=False)[1].known

    def _delete_oldest(
        self,
        connection: sqlite3.Connection,
        namespace: str,
        window: Window,
        leave: int,
        prompt: int | None,
        used: bool,
    ) -> bool:
        """Deletes the oldest responses, and the prompts of a named problem that have no others.

        Keeps `prompt`, that of the batch, if it is `used` for new responses. Returns whether all of them are deleted.
        """
        while leave:
            some = min(leave, DELETED_AT_ONCE)
            for epoch, number, prompts in window.remove_oldest(some):
                of = tuple(prompts) or (prompt,)
                which = f"prompt IN ({marks(of)}) AND epoch = ? AND {STAYS} ORDER BY id"
                _delete(connection, which, (*of, epoch, namespace), number)
                for emptied in prompts - {prompt} if used else prompts:
                    _delete_unused(connection, emptied)
            leave -= some
            if leave and self._slice.over():
                return False
        return True

    def _insert(self, connection: sqlite3.Connection, namespace: str, prompt: int, records: list[Record]) -> None:
        connection.execute("REPLACE INTO writes (prompt, latest) VALUES (?, ?)", (prompt, time.time()))
        connection.executemany(
            f"INSERT INTO responses ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [to_row(record, prompt) for record in records],
        )
        epoch = max(record.epoch for record in records)
        if epoch > self._newest.get(namespace, -1):
            connection.execute(
                "INSERT INTO namespaces (namespace, newest_epoch) VALUES (?, ?) ON CONFLICT (namespace) DO UPDATE "
                "SET newest_epoch = excluded.newest_epoch WHERE excluded.newest_epoch > newest_epoch",
                (namespace, epoch),
            )
            self._newest[namespace] = epoch


def _delete(connection: sqlite3.Connection, which: str, parameters: Sequence[object], most: int) -> int:
    """Deletes responses, at most so many. Returns how many."""
    text = f"DELETE FROM responses WHERE id IN (SELECT id FROM responses WHERE {which} LIMIT ?)"
    return connection.execute(text, (*parameters, most)).rowcount


def _delete_unused(connection: sqlite3.Connection, prompt: int) -> None:
    """Deletes a prompt if it has no responses."""
    unused = "DELETE FROM prompts WHERE id = ? AND NOT EXISTS (SELECT 1 FROM responses WHERE prompt = ?)"
    connection.execute(unused, (prompt, prompt))


class Departure(NamedTuple):
    """A row of `leaving`, and how far its deletion is."""

    number: int
    namespace: str
    epoch: int
    response: int
    after: tuple[str, bytes, int] = ("", b"", 0)
    gone: int = 0


def depart(slice_: Slice, namespace: str, epoch: int | None, connection: sqlite3.Connection) -> Again:
    """Records that responses newer than an epoch leave a namespace; None: the whole namespace leaves."""
    if epoch is None:
        connection.execute("DELETE FROM estimators WHERE namespace = ?", (namespace,))
        connection.execute("DELETE FROM namespaces WHERE namespace = ?", (namespace,))
        epoch = -1
    newest = "UPDATE namespaces SET newest_epoch = min(newest_epoch, ?) WHERE namespace = ?"
    connection.execute(newest, (epoch, namespace))
    (response,) = connection.execute("SELECT coalesce(max(id), 0) FROM responses").fetchone()
    row = (namespace, epoch, response)
    number = connection.execute("INSERT INTO leaving (namespace, epoch, response) VALUES (?, ?, ?)", row).lastrowid
    assert number is not None
    return Again(partial(work_off, slice_, Departure(number, *row)))


def departures(connection: sqlite3.Connection) -> list[Departure]:
    """Returns the recorded departures that are not finished."""
    return [Departure(*row) for row in connection.execute("SELECT id, namespace, epoch, response FROM leaving")]


def work_off(slice_: Slice, what: Departure, connection: sqlite3.Connection) -> "Again | int":
    """Deletes the responses of a departure. Returns how many there were in total."""
    after, gone = what.after, what.gone
    while True:
        row = connection.execute(
            "SELECT problem, digest, id FROM prompts WHERE namespace = ? AND (problem, digest, id) > (?, ?, ?) "
            "ORDER BY problem, digest, id LIMIT 1",
            (what.namespace, *after),
        ).fetchone()
        if row is None:
            connection.execute("DELETE FROM leaving WHERE id = ?", (what.number,))
            return gone
        those = (row[2], what.epoch, what.response)
        some = _delete(connection, "prompt = ? AND epoch > ? AND id <= ?", those, DELETED_AT_ONCE)
        gone += some
        if some < DELETED_AT_ONCE:
            _delete_unused(connection, row[2])
            after = row
        if slice_.over():
            return Again(partial(work_off, slice_, what._replace(after=after, gone=gone)))


class Place(NamedTuple):
    """A place in the order in which retention looks at prompts: all of one problem follow each other."""

    prompt: tuple[str, str, bytes, int] = ("", "", b"", 0)
    """Namespace, name, digest and id."""
    problem: tuple[str, str] = ("", "")
    """The last named problem with an old prompt ..."""
    alive: bool = False
    """... and whether another of its prompts had a write since then: asked once, since it reads all of them."""


START = Place()


def each_prompt(connection: sqlite3.Connection, since: float, after: Place) -> Iterator[tuple[Place, bool]]:
    """Yields the places of all further prompts, and whether their problems had no write since then."""
    while page := connection.execute(
        "SELECT namespace, problem, digest, id, latest FROM prompts JOIN writes ON prompt = id "
        "WHERE (namespace, problem, digest, id) > (?, ?, ?, ?) ORDER BY namespace, problem, digest, id LIMIT ?",
        (*after.prompt, LISTED_AT_ONCE),
    ).fetchall():
        for *prompt, latest in page:
            problem, alive = after.problem, after.alive
            old = latest < since
            if old and prompt[1]:
                if problem != (prompt[0], prompt[1]):
                    problem = prompt[0], prompt[1]
                    alive = _kept_alive(connection, problem, since)
                old = not alive
            after = Place(tuple(prompt), problem, alive)
            yield after, old


def _kept_alive(connection: sqlite3.Connection, problem: tuple[str, str], since: float) -> bool:
    """Returns whether a named problem had a write since then."""
    latest = "SELECT 1 FROM prompts JOIN writes ON prompt = id WHERE namespace = ? AND problem = ? AND latest >= ?"
    return bool(connection.execute(f"{latest} LIMIT 1", (*problem, since)).fetchone())


def forget_old(
    slice_: Slice, since: float, connection: sqlite3.Connection, after: Place = START, gone: int = 0
) -> "Again | int":
    """Deletes problems without a write since then. Returns how many prompts they had in total.

    Decides once for each problem: a write to a problem that is being deleted keeps only what it adds.
    """
    for place, old in each_prompt(connection, since, after):
        prompt = place.prompt[-1]
        while old and _delete(connection, "prompt = ?", (prompt,), DELETED_AT_ONCE) == DELETED_AT_ONCE:
            if slice_.over():
                again = Place(after.prompt, place.problem, place.alive)
                return Again(partial(forget_old, slice_, since, after=again, gone=gone))
        if old:
            gone += connection.execute("DELETE FROM prompts WHERE id = ?", (prompt,)).rowcount
        after = place
        if slice_.over():
            return Again(partial(forget_old, slice_, since, after=after, gone=gone))
    return gone
