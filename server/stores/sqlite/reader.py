"""Reads the SQLite store: for its server, or as a snapshot of one moment, whatever is written meanwhile."""

import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import structlog

from histospec.server.errors import Damaged, StoreError
from histospec.server.stores.interface import PROMPT_BYTES, RESPONSE_BYTES, Problem, Reader, Record, within
from histospec.server.stores.records import COLUMNS, DamageCount, from_row
from histospec.server.stores.sqlite.damage import lost_before, note_loss, salvage
from histospec.server.stores.sqlite.database import (
    DAMAGE,
    Readers,
    connect_to_read,
    damaged_log,
    digest_of,
    is_damage,
    open_existing,
)
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.structure import structural_damage

PAGE = 500  # prompts per query
# The limits of one query of responses: their number, and for indexing their bytes unless the first alone has more.
ROWS = 256
PAGE_BYTES = 4 << 20
SIZED_AT_ONCE = 10_000  # rows whose sizes one query adds up
# The limits of one page of `wanted_first`: problems, and their responses.
PROBLEMS_AT_ONCE = 64
RESPONSES_AT_ONCE = 512

log = structlog.get_logger()
T = TypeVar("T")

NAMING = "id, namespace, problem, digest, tokens"  # columns of prompts
# The bytes of the arrays of a response.
SIZE = "length(tokens) + length(logprobs) + length(generated) + length(alternatives)"
# The bytes of the names of a prompt.
NAMES = "length(CAST(namespace AS BLOB)) + length(CAST(problem AS BLOB))"
# Readers no longer see what a drop or a rewind has yet to delete; the parameter is the namespace.
STAYS = (
    "NOT EXISTS (SELECT 1 FROM leaving WHERE leaving.namespace = ? "
    "AND responses.epoch > leaving.epoch AND responses.id <= leaving.response)"
)

# Every prompt that has responses, and how many. First the namespace with the latest write; in it the prompts with the
# newest epoch; of these, the prompts with the latest write first. Reads indexes and small tables, no response.
BY_WANT = """
SELECT held.prompt, held.responses
FROM (SELECT prompt, max(epoch) AS newest, count(*) AS responses FROM responses GROUP BY prompt) AS held
LEFT JOIN prompts ON prompts.id = held.prompt
LEFT JOIN writes ON writes.prompt = held.prompt
ORDER BY max(latest) OVER (PARTITION BY namespace) DESC, namespace, newest DESC, latest DESC, held.prompt DESC
"""


class SQLiteReader(Reader):
    """Reads through borrowed connections. Returns the newest `history_responses` of a problem; 0 for all.

    For indexing (`pages`), returns only the newest `history_epochs` of these; 0 for all. The store may still hold more
    than are wanted now.
    """

    def __init__(self, readers: Readers, path: Path, history_responses: int = 0, history_epochs: int = 0) -> None:
        self._readers = readers
        self._path = path
        self._most = history_responses
        self._epochs = history_epochs
        self._damage = DamageCount()

    def newest_epochs(self) -> dict[str, int]:
        """See Reader."""
        rows = self._read("SELECT CAST(namespace AS TEXT), CAST(newest_epoch AS INTEGER) FROM namespaces")
        return {namespace: max(0, newest) for namespace, newest in rows}

    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """See Reader."""
        last: tuple[str, bytes, int] = ("", b"", 0)
        done = ""  # the last name seen: a named problem may have several prompts
        while page := self._read(
            "SELECT problem, digest, id FROM prompts WHERE namespace = ? AND (problem, digest, id) > (?, ?, ?) "
            "ORDER BY problem, digest, id LIMIT ?",
            (namespace, *last, PAGE),
        ):
            for name, _, prompt in page:
                if name and name == done:
                    continue
                found = self._named(prompt, self._read(f"SELECT {NAMING} FROM prompts WHERE id = ?", (prompt,)))
                if found is None:
                    continue
                done = name
                if records := self.history(found):
                    yield found, records
            last = page[-1]

    def _named(self, prompt: int, rows: Sequence[Any]) -> Problem | None:
        """Returns the problem of a row with NAMING; None if it was removed or is damaged, with all its responses."""
        for _, namespace, name, digest, tokens in rows:
            named = isinstance(namespace, str) and isinstance(name, str) and isinstance(tokens, bytes)
            if named and digest_of(tokens) == digest:
                return Problem(namespace, tokens, name)
        for (response,) in self._read("SELECT id FROM responses WHERE prompt = ?", (prompt,)):
            self._damage.found(response, "store: the prompt of a response is not what was written")
        return None

    def wanted_first(self) -> Iterator[list[Problem]]:
        """See Store. A named problem may appear once for each of its prompts."""
        prompts, responses = self._read_as(_columns, BY_WANT)
        first = 0
        while first < len(prompts):
            end, held = first, 0
            while end < len(prompts) and end - first < PROBLEMS_AT_ONCE and held < RESPONSES_AT_ONCE:
                held += responses[end]
                end += 1
            page = prompts[first:end].tolist()
            rows: dict[int, list[Any]] = {}
            for row in self._read(f"SELECT {NAMING} FROM prompts WHERE id IN ({marks(page)})", page):
                rows[row[0]] = [row]
            found = (self._named(prompt, rows.get(prompt, [])) for prompt in page)
            yield [problem for problem in found if problem is not None]
            first = end

    def history(self, problem: Problem, limit: int = 0, max_bytes: int | None = None) -> list[Record]:
        """See Reader."""
        numbers = [number for (number,) in self._newest(problem, limit)]
        if max_bytes is not None:
            size = f"SELECT total({SIZE}) FROM responses WHERE id IN "
            within(max_bytes, sum(int(self._read(f"{size}({marks(some)})", some)[0][0]) for some in _parts(numbers)))
        pages = [self._page(some) for some in _parts(numbers)]
        return [record for page in reversed(pages) for record in page]

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        """See Reader."""
        page: list[int] = []
        size = 0
        epochs = set()
        for number, epoch, its_size in self._newest(problem, columns=f"id, epoch, {SIZE}"):
            epochs.add(epoch)
            if self._epochs and len(epochs) > self._epochs:
                break
            if page and (len(page) == ROWS or size + (its_size or 0) > PAGE_BYTES):
                yield self._page(page)
                page, size = [], 0
            page.append(number)
            size += its_size or 0
        if page:
            yield self._page(page)

    def _newest(self, problem: Problem, limit: int = 0, columns: str = "id") -> list[Any]:
        """Returns columns of a problem's current responses, newest first. For ids and epochs, reads only the index."""
        among, key = prompts_of(problem)
        newest = min(limit or self._most, self._most or limit) or -1
        query = f"FROM responses WHERE prompt IN ({among}) AND {STAYS} ORDER BY epoch DESC, id DESC LIMIT ?"
        return self._read(f"SELECT {columns} {query}", (*key, problem.namespace, newest))

    def _page(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the responses with these ids, oldest first, without damaged or removed ones."""
        rows = self._read(f"SELECT id, {COLUMNS} FROM responses WHERE id IN ({marks(numbers)})", numbers)
        found = {row[0]: row for row in rows}
        records = (self._intact(found[number]) for number in reversed(numbers) if number in found)
        return [record for record in records if record is not None]

    def _intact(self, row: Sequence[Any]) -> Record | None:
        try:
            return from_row(row[1:])
        except Damaged as error:
            self._damage.found(row[0], str(error))
            return None

    def estimator(self, namespace: str) -> bytes | None:
        """See Reader."""
        rows = self._read("SELECT CAST(state AS BLOB) FROM estimators WHERE namespace = ?", (namespace,))
        return bytes(rows[0][0]) if rows else None

    def sizes(self) -> dict[str, int]:
        """See Reader. Reads no arrays, and a page of rows at a time."""
        found: Counter[str] = Counter()
        for table, namespace, size in (
            ("prompts", "namespace", f"length(tokens) + 2 * ({NAMES}) + {PROMPT_BYTES}"),
            (
                "responses",
                "(SELECT namespace FROM prompts WHERE prompts.id = responses.prompt)",
                f"{SIZE} + {RESPONSE_BYTES}",
            ),
        ):
            last = 0
            while page := self._read(
                f"SELECT CAST(owner AS TEXT), CAST(total(size) AS INTEGER), max(id) FROM (SELECT id, {namespace} AS "
                f"owner, {size} AS size FROM {table} WHERE id > ? ORDER BY id LIMIT ?) GROUP BY owner",
                (last, SIZED_AT_ONCE),
            ):
                for owner, number, _ in page:
                    found[owner or ""] += number
                last = max(row[2] for row in page)
        return dict(found)

    def count(self) -> int:
        """See Reader."""
        return int(self._read("SELECT count(*) FROM responses")[0][0])

    def _read(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        return self._read_as(list, query, parameters)

    def _read_as(self, take: Callable[[Iterable[Any]], T], query: str, parameters: Sequence[object] = ()) -> T:
        """Returns what `take` makes of the rows. Raises StoreError."""
        for repaired in (False, True):
            failure: Exception
            generation = self._readers.generation
            try:
                with self._readers.one() as connection:
                    generation = self._readers.generation  # constant while a connection is lent
                    with closing(connection.execute(query, parameters)) as rows:
                        return take(rows)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                failure = error
            if repaired or not is_damage(failure) or not self._repair(generation, failure):
                break
        raise StoreError(f"store: {self._path} cannot be read: {failure}") from failure

    def _repair(self, generation: int, error: Exception) -> bool:
        """Returns whether a new file has replaced the damaged one that this generation of readers has."""
        return False

    @property
    def damaged_responses(self) -> int:
        """See Reader."""
        return self._damage.responses

    def close(self) -> None:
        """See Reader."""
        self._readers.close()


class SQLiteSnapshot(SQLiteReader):
    """A read-only view. For a damaged file, reads a temporary copy of the readable contents.

    Raises ConfigError if there is no store, or one of another version.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / FILE_NAME
        lost = damaged_log(path)
        self._copy: TemporaryDirectory[str] | None = None
        try:
            connection = open_existing(path)
            damaged = bool(structural_damage(connection))
        except DAMAGE as error:
            if not is_damage(error):
                raise
            connection = connect_to_read(path)
            damaged = True
        super().__init__(Readers([connection]), path)
        self._damage.lost(lost_before(path))
        if lost:
            log.error("the store is damaged", reason=lost)
            self._damage.lost(1)  # how many is unknown
            note_loss(path)
        if damaged and not self._salvage():
            raise StoreError(f"store: {path} is damaged, and none of it can be read")

    def _repair(self, generation: int, error: Exception) -> bool:
        """See SQLiteReader."""
        return self._copy is None and self._salvage()

    def _salvage(self) -> bool:
        self._copy = TemporaryDirectory(prefix="histospec-")
        copy = Path(self._copy.name) / FILE_NAME
        try:
            salvaged = salvage(self._path, copy)
        except DAMAGE as error:
            log.error("the damaged store cannot be read", file=str(self._path), reason=str(error))
            return False
        with self._readers.away():
            self._readers.end()
            self._readers.add(open_existing(copy))
        self._damage.lost(salvaged.lost)
        return True

    def close(self) -> None:
        """See Reader."""
        super().close()
        if self._copy:
            self._copy.cleanup()


def _columns(rows: Iterable[Any]) -> tuple["array[int]", "array[int]"]:
    """Returns two columns of numbers, 12 bytes per row."""
    first, second = array("q"), array("I")
    for one, other in rows:
        first.append(one)
        second.append(other)
    return first, second


def marks(values: Sequence[object]) -> str:
    """Returns the place holders of values in a query."""
    return ", ".join("?" * len(values))


def _parts(numbers: list[int]) -> Iterator[list[int]]:
    return (numbers[first : first + ROWS] for first in range(0, len(numbers), ROWS))


def prompts_of(problem: Problem) -> tuple[str, tuple[str | bytes, ...]]:
    """Returns a query for the prompts of a problem, and its parameters. A named problem may have several prompts."""
    if problem.name:
        return "SELECT id FROM prompts WHERE namespace = ? AND problem = ?", (problem.namespace, problem.name)
    return (
        "SELECT id FROM prompts WHERE namespace = ? AND problem = '' AND digest = ? AND tokens = ?",
        (problem.namespace, digest_of(problem.prompt), problem.prompt),
    )
