"""What the SQLite store holds."""

import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from histospec.server.errors import StoreError
from histospec.server.sqlite_file import FILE_NAME, open_snapshot
from histospec.server.store import Batch, Problem, Reader, Record

PAGE = 500  # prompts listed at a time
_RECORDS = "SELECT tokens, epoch, reward, logprobs, generated, seed FROM responses"


class SQLiteReader(Reader):
    """Reads through one connection."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._reader = connection
        self._path = path
        self._reading = threading.Lock()

    @classmethod
    def snapshot(cls, directory: Path) -> "SQLiteReader":
        """What the store in a directory holds at this moment, whatever is written to it meanwhile.

        Raises ConfigError where there is none, or one of another version.
        """
        return cls(open_snapshot(directory / FILE_NAME), directory / FILE_NAME)

    def newest_epochs(self) -> dict[str, int]:
        """See Reader."""
        return dict(self._read("SELECT namespace, newest_epoch FROM namespaces"))

    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """See Reader."""
        last: tuple[str, bytes, int] = ("", b"", 0)
        while page := self._read(
            "SELECT problem, digest, id FROM prompts WHERE namespace = ? AND (problem, digest, id) > (?, ?, ?) "
            "ORDER BY problem, digest, id LIMIT ?",
            (namespace, *last, PAGE),
        ):
            for row in page:
                before, last = last, row
                name, _, prompt = row
                if name and name == before[0]:  # another prompt of the same problem
                    continue
                for (tokens,) in self._read("SELECT tokens FROM prompts WHERE id = ?", (prompt,)):
                    problem = Problem(namespace, tokens, name)
                    if records := self.history(problem):
                        yield problem, records

    def history(self, problem: Problem, limit: int = 0) -> list[Record]:
        """See Reader."""
        among, key = prompts_of(problem)
        rows = self._read(
            f"{_RECORDS} WHERE prompt IN ({among}) ORDER BY epoch DESC, id DESC LIMIT ?", (*key, limit or -1)
        )
        return [Record(*row) for row in reversed(rows)]

    def estimator(self, namespace: str) -> bytes | None:
        """See Reader."""
        rows = self._read("SELECT CAST(state AS BLOB) FROM estimators WHERE namespace = ?", (namespace,))
        return bytes(rows[0][0]) if rows else None

    def count(self) -> int:
        """See Reader."""
        return int(self._read("SELECT count(*) FROM responses")[0][0])

    def load(self) -> Iterator[Batch]:
        """Every response stored before this call, oldest epoch first, one problem and epoch at a time."""
        newest = self._read("SELECT max(id) FROM responses")[0][0] or 0
        groups = self._read(
            "SELECT DISTINCT epoch, prompt FROM responses WHERE id <= ? ORDER BY epoch, prompt", (newest,)
        )
        for epoch, prompt in groups:
            rows = self._read(
                f"{_RECORDS} WHERE prompt = ? AND epoch = ? AND id <= ? ORDER BY id", (prompt, epoch, newest)
            )
            owner = self._read("SELECT namespace, tokens, problem FROM prompts WHERE id = ?", (prompt,))
            if rows and owner:  # else they left the window meanwhile
                yield Batch(Problem(*owner[0]), [Record(*row) for row in rows])

    def _read(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        with self._reading:
            try:
                return self._reader.execute(query, parameters).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"store: {self._path} cannot be read: {error}") from error

    def close(self) -> None:
        """See Reader."""
        self._reader.close()


def digest_of(tokens: bytes) -> bytes:
    """8 bytes that narrow the search for a prompt."""
    return hashlib.blake2b(tokens, digest_size=8).digest()


def prompts_of(problem: Problem) -> tuple[str, tuple[str | bytes, ...]]:
    """A query for the prompts of a problem, and its parameters: a named problem may have several prompts."""
    if problem.name:
        return "SELECT id FROM prompts WHERE namespace = ? AND problem = ?", (problem.namespace, problem.name)
    return (
        "SELECT id FROM prompts WHERE namespace = ? AND problem = '' AND digest = ? AND tokens = ?",
        (problem.namespace, digest_of(problem.prompt), problem.prompt),
    )
