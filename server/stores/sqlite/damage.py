"""Replaces a damaged SQLite file: copies what can be read of it to a new one.

The damaged file is read and renamed, never written to. The new one gets its final name when it is complete:

    histospec.sqlite.salvaging    being filled; after a crash, the next attempt starts again
    histospec.sqlite.salvaged     complete; next, the damaged file is renamed
    histospec.sqlite.damaged-...  the damaged file with its write-ahead log, for a person to inspect
    ....damaged-....lost          how many responses were lost with it, until a person deletes this file
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from histospec.server.errors import ConfigError, Damaged, StoreError
from histospec.server.security import private
from histospec.server.stores.records import COLUMNS, from_row
from histospec.server.stores.sqlite.database import (
    DAMAGE,
    connect_to_read,
    digest_of,
    open_store_file,
)
from histospec.server.stores.sqlite.file import besides

log = structlog.get_logger()

LOST = ".lost"
COMMIT_BYTES = 4 << 20  # the most that a full disk may cost of the copied data
LOG_SECONDS = 5.0
NEIGHBOURS = 1000  # rows tried one by one after an unreadable one, before the steps grow


class Salvaged(NamedTuple):
    """The result of a salvage."""

    responses: int
    """Responses in the new file."""
    lost: int
    """Responses that the new file lacks: damaged or unreadable."""
    exact: bool
    """Whether `lost` is exact; otherwise at least that many are lost."""
    full: bool
    """Whether there was too little space for all readable responses."""


def replace(path: Path, disk: int | None, reason: str, cut: bool = False) -> Salvaged:
    """Puts a new file with the readable contents in the place of a damaged one, which gets another name.

    `cut`: the end of a file is gone, so responses are lost even if the rest is whole.

    Raises StoreError if that fails; the damaged file then stays in place.
    """
    log.error("the store is damaged; what can be read goes to a new file", file=str(path), reason=reason)
    _, salvaged = _stages(path)
    aside = _aside(path)
    try:
        result = salvage(path, salvaged, disk)
        if cut and not result.lost:
            result = result._replace(lost=1, exact=False)
        if result.lost:
            _note(aside, result.lost)
        for old, new in zip(besides(path)[:2], besides(aside)[:2], strict=True):
            with suppress(FileNotFoundError):
                old.rename(new)
        besides(path)[2].unlink(missing_ok=True)
        salvaged.rename(path)
        private.sync_folder(path.absolute().parent)
    except (OSError, sqlite3.Error, ConfigError) as error:
        raise StoreError(f"store: {path} is damaged ({reason}) and cannot be replaced: {error}") from error
    log.error(
        "the damaged store was set aside",
        damaged=str(aside),
        file=str(path),
        responses=result.responses,
        lost=result.lost,
        lost_is_exact=result.exact,
        disk_full=result.full,
    )
    return result


def _aside(path: Path) -> Path:
    """Returns a name for the damaged file that is not in use."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    number = 0
    while aside.exists() or _note_of(aside).exists():
        number += 1
        aside = aside.with_name(f"{aside.name.partition('_')[0]}_{number}")
    return aside


def _note_of(aside: Path) -> Path:
    return aside.with_name(f"{aside.name}{LOST}")


def _note(aside: Path, lost: int) -> None:
    note = _note_of(aside)
    private.create(note)
    note.write_text(f"{lost}\n")


def note_loss(path: Path) -> None:
    """Notes that at least one response is lost, for later runs: SQLite forgets that its log was damaged."""
    with suppress(OSError):
        _note(_aside(path), 1)


def lost_before(path: Path) -> int:
    """Returns how many responses earlier replacements lost, as far as no person has deleted the notes of it."""
    lost = 0
    for note in path.parent.glob(f"{path.name}.damaged-*{LOST}"):
        text = note.read_text(errors="replace").strip()
        lost += int(text) if text.isdecimal() else 1
    return lost


def resume(path: Path) -> None:
    """Finishes or undoes a replacement that a crash interrupted."""
    salvaging, salvaged = _stages(path)
    for unfinished in (salvaging, *([salvaged] if path.exists() else [])):
        for file in besides(unfinished):
            file.unlink(missing_ok=True)
    if salvaged.exists():
        for file in besides(path)[1:]:  # the log of a renamed file does not belong to the new one
            file.unlink(missing_ok=True)
        salvaged.rename(path)


def _stages(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.salvaging"), path.with_name(f"{path.name}.salvaged")


def salvage(path: Path, copy: Path, disk: int | None = None) -> Salvaged:
    """Copies the readable contents of a file to a new one at `copy`."""
    unfinished, _ = _stages(path) if copy.parent == path.parent else (copy, copy)
    for file in besides(unfinished):
        file.unlink(missing_ok=True)
    with closing(open_store_file(unfinished, disk)) as target, closing(connect_to_read(path)) as source:
        source.execute("PRAGMA writable_schema = ON")  # reads what it can if the schema itself is damaged
        result = _copy(source, target)
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    unfinished.rename(copy)
    return result


class _Copy:
    """Copies rows from one file to the other, newest first: if space runs out, the newest are kept."""

    def __init__(self, source: sqlite3.Connection, target: sqlite3.Connection) -> None:
        self._source = source
        self._target = target
        self.responses = 0
        self.damaged = 0

    def table(self, name: str, **columns: type) -> None:
        """Copies the readable rows of a small table whose values have these types."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        for _, *row in _rows(self._source, name, names):
            if all(isinstance(value, kind) for value, kind in zip(row, columns.values(), strict=True)):
                self._target.execute(f"REPLACE INTO {name} ({names}) VALUES ({marks})", row)

    def prompts(self) -> None:
        """Copies the intact prompts."""
        for _, *row in _rows(self._source, "prompts", "id, namespace, problem, digest, tokens"):
            tokens, digest = row[4], row[3]
            if isinstance(tokens, bytes) and digest_of(tokens) == digest:
                self._target.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?, ?)", row)

    def all_responses(self) -> None:
        """Copies the intact responses that have a prompt."""
        logged = time.monotonic()
        size = 0
        columns = f"id, {COLUMNS}"
        insert = f"INSERT OR IGNORE INTO responses ({columns}) VALUES ({', '.join('?' * len(columns.split(',')))})"
        for number, *row in _rows(self._source, "responses", COLUMNS):
            try:
                size += from_row(row).size
                known = self._target.execute("SELECT 1 FROM prompts WHERE id = ?", row[:1]).fetchone()
            except Damaged:
                known = None
            if not known:
                self.damaged += 1
                continue
            self.responses += self._target.execute(insert, (number, *row)).rowcount
            if size >= COMMIT_BYTES:
                size = 0
                self.keep()
                if time.monotonic() - logged > LOG_SECONDS:
                    logged = time.monotonic()
                    log.warning("salvaging", responses=self.responses, damaged=self.damaged)

    def keep(self) -> None:
        """Commits, so that a full disk costs nothing of the rows copied so far."""
        self._target.execute("COMMIT")
        self._target.execute("BEGIN")

    def complete(self) -> None:
        """Derives unreadable rows from other rows where possible."""
        self._target.execute("INSERT OR IGNORE INTO writes SELECT id, ? FROM prompts", (time.time(),))
        self._target.execute("DELETE FROM writes WHERE prompt NOT IN (SELECT id FROM prompts)")
        self._target.execute(
            "INSERT OR IGNORE INTO namespaces "
            "SELECT namespace, max(epoch) FROM responses JOIN prompts ON prompts.id = prompt GROUP BY namespace"
        )


def _copy(source: sqlite3.Connection, target: sqlite3.Connection) -> Salvaged:
    copy = _Copy(source, target)
    full = False
    target.execute("BEGIN")
    steps: tuple[Callable[[], None], ...] = (
        lambda: copy.table("leaving", id=int, namespace=str, epoch=int, response=int),
        lambda: copy.table("clock", one=int, seen=float, since=float, forgotten=float, paused=str),
        lambda: copy.table("namespaces", namespace=str, newest_epoch=int),
        lambda: copy.table("estimators", namespace=str, state=bytes),
        copy.prompts,
        lambda: copy.table("writes", prompt=int, latest=float),
        copy.keep,
        copy.all_responses,
        copy.complete,
    )
    for step in steps:
        try:
            step()
        except sqlite3.OperationalError as error:  # noqa: PERF203 - the next step may need less space
            if "full" not in str(error):
                raise
            full = True
            if not target.in_transaction:  # a full disk ended it
                target.execute("BEGIN")
    if target.in_transaction:
        target.execute("COMMIT")
    (copied,) = target.execute("SELECT count(*) FROM responses").fetchone()
    expected = _expected(source)
    exact = expected is not None and expected >= copied
    if expected is not None and exact:
        return Salvaged(copied, expected - copied, exact, full)
    # How many are lost is unknown: at least one, otherwise the loss would look like none.
    return Salvaged(copied, max(1, copy.damaged, _at_least(source) - copied), exact, full)


def _at_least(source: sqlite3.Connection) -> int:
    """Returns how many responses the readable parts of the index list."""
    count = 0
    query = "SELECT count(*) FROM responses INDEXED BY responses_by_prompt WHERE prompt = ?"
    for prompt, *_ in _rows(source, "prompts", "id"):
        with suppress(*DAMAGE):
            count += source.execute(query, (prompt,)).fetchone()[0]
    return count


def _expected(source: sqlite3.Connection) -> int | None:
    """Returns the original number of responses, from the index or the table; None if neither can be read."""
    for where in ("INDEXED BY responses_by_prompt", "NOT INDEXED"):
        with suppress(*DAMAGE):
            return int(source.execute(f"SELECT count(*) FROM responses {where}").fetchone()[0])
    return None


def _rows(source: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
    """Yields every readable row of a table after its rowid, the highest first."""
    query = f"SELECT rowid, {columns} FROM {table} WHERE rowid < ? ORDER BY rowid DESC"
    at = 1 << 62
    while True:
        try:
            for row in source.execute(query, (at,)):
                yield row
                at = min(at, row[0])  # in a damaged tree, rows may come in any order
        except DAMAGE:  # noqa: PERF203 - continues after the unreadable part
            below = _next_readable(source, f"{query} LIMIT 1", min(at, _highest(source, table, at)))
            if below is None:
                return
            at = below
        else:
            return


def _highest(source: sqlite3.Connection, table: str, at: int) -> int:
    """Returns a rowid above all others, so that a search need not start at the largest integer."""
    for query in (f"SELECT max(rowid) FROM {table}", f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'"):
        with suppress(*DAMAGE):
            for (highest,) in source.execute(query):
                if isinstance(highest, int):
                    return highest + 1
    return at


def _next_readable(source: sqlite3.Connection, query: str, at: int) -> int | None:
    """Returns the highest bound below `at` from which the next row can be read; None if there is none."""

    def readable(bound: int) -> bool:
        try:
            source.execute(query, (bound,)).fetchone()
        except DAMAGE:
            return False
        return True

    for bound in range(at - 1, max(at - NEIGHBOURS, 0), -1):
        if readable(bound):
            return bound
    unreadable, step = at - NEIGHBOURS, NEIGHBOURS
    while unreadable > 0:
        bound = max(unreadable - step, 0)
        if readable(bound):
            while unreadable - bound > 1:
                middle = (bound + unreadable) // 2
                bound, unreadable = (middle, unreadable) if readable(middle) else (bound, middle)
            return bound
        unreadable, step = bound, 2 * step
    return None
