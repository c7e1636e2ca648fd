"""The store in one SQLite file beside the server.

One thread writes. It takes everything that waits, writes it in one transaction and syncs once (group commit), so many
callers share the price of an fsync and each is told only after the bytes are on the disk: WAL with synchronous=FULL.
"""

import fcntl
import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from histospec.server.errors import ConfigError, StoreError, StoreFull
from histospec.server.group_commit import GroupCommit, Work
from histospec.server.store import Batch, Problem, Record, Store, total_size

APPLICATION_ID = 0x48495354  # "HIST"
FILE_NAME = "histospec.sqlite"

# One script a version: a new file takes them all, an older one those that it has not seen.
SCHEMA = (
    """
CREATE TABLE prompts (
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL,
    problem TEXT NOT NULL,  -- the explicit name, or '' where the tokens name the problem
    digest BLOB NOT NULL,   -- narrows the search; the tokens decide
    tokens BLOB NOT NULL
);
CREATE INDEX prompts_by_digest ON prompts (namespace, problem, digest);
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- ids are never used twice, so they order responses by arrival
    prompt INTEGER NOT NULL REFERENCES prompts (id),
    epoch INTEGER NOT NULL,
    reward REAL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    generated BLOB NOT NULL
);
CREATE INDEX responses_by_prompt ON responses (prompt, epoch);
""",
    """
CREATE TABLE estimators (
    namespace TEXT PRIMARY KEY,
    state BLOB NOT NULL
);
""",
)
SCHEMA_VERSION = len(SCHEMA)

_Write = Callable[[sqlite3.Connection], Any]


class SQLiteStore(Store):
    """Responses in `DIR/histospec.sqlite`; `DIR` is locked against a second server.

    Raises ConfigError where the directory or the file in it cannot be used.
    """

    def __init__(self, directory: Path, history_epochs: int) -> None:
        self._history_epochs = history_epochs
        self._lock = _lock(directory)
        self._path = directory / FILE_NAME
        try:
            self._reader = _open(self._path)
        except BaseException:
            os.close(self._lock)
            raise
        self._reading = threading.Lock()
        self._connection = _connect(self._path)  # of the writer
        self._writer: GroupCommit[_Write] = GroupCommit(self._commit, lambda: self._connection.close())

    # Writing

    def append(self, batch: Batch) -> "Future[None]":
        """See Store."""
        size = total_size(batch.records) + len(batch.problem.prompt)
        return self._writer.submit(lambda connection: self._append(connection, batch), size)

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> int:
            dropped = connection.execute(
                "DELETE FROM responses WHERE prompt IN (SELECT id FROM prompts WHERE namespace = ?)", (namespace,)
            ).rowcount
            connection.execute("DELETE FROM prompts WHERE namespace = ?", (namespace,))
            connection.execute("DELETE FROM estimators WHERE namespace = ?", (namespace,))
            return dropped

        return self._writer.submit(run, 0)

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "DELETE FROM responses WHERE epoch > ? AND prompt IN (SELECT id FROM prompts WHERE namespace = ?)",
                (epoch, namespace),
            ).rowcount

        return self._writer.submit(run, 0)

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> None:
            connection.execute("REPLACE INTO estimators (namespace, state) VALUES (?, ?)", (namespace, state))

        return self._writer.submit(run, len(state))

    def _commit(self, group: list[Work[_Write]]) -> None:
        """Writes a group in one transaction; when it fails, each alone, so that one cannot spoil the others'."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            results = [work.what(self._connection) for work in group]
            self._connection.execute("COMMIT")
        except Exception as error:
            self._connection = _recover(self._connection, self._path)
            if len(group) > 1:
                for work in group:
                    self._commit([work])
            else:
                self._writer.fail(group[0], _explain(error))
            return
        for work, result in zip(group, results, strict=True):
            self._writer.settle(work, result)

    def _append(self, connection: sqlite3.Connection, batch: Batch) -> None:
        problem = batch.problem
        key = (problem.namespace, problem.name, _digest(problem.prompt), problem.prompt)
        row = connection.execute(
            "SELECT id FROM prompts WHERE namespace = ? AND problem = ? AND digest = ? AND tokens = ?", key
        ).fetchone()
        prompt = (
            row[0]
            if row
            else connection.execute(
                "INSERT INTO prompts (namespace, problem, digest, tokens) VALUES (?, ?, ?, ?)", key
            ).lastrowid
        )
        connection.executemany(
            "INSERT INTO responses (prompt, epoch, reward, tokens, logprobs, generated) VALUES (?, ?, ?, ?, ?, ?)",
            [(prompt, r.epoch, r.reward, r.tokens, r.logprobs, r.generated) for r in batch.records],
        )
        self._slide(connection, problem)

    def _slide(self, connection: sqlite3.Connection, problem: Problem) -> None:
        """Keeps the newest epochs of the problem."""
        among, key = _among(problem)
        oldest = connection.execute(
            f"SELECT DISTINCT epoch FROM responses WHERE prompt IN ({among}) ORDER BY epoch DESC LIMIT 1 OFFSET ?",
            (*key, self._history_epochs - 1),
        ).fetchone()
        if oldest is None:
            return
        deleted = connection.execute(
            f"DELETE FROM responses WHERE prompt IN ({among}) AND epoch < ?", (*key, *oldest)
        ).rowcount
        if problem.name and deleted:  # a named problem may come with a new prompt every time
            connection.execute(
                f"DELETE FROM prompts WHERE id IN ({among}) "
                "AND NOT EXISTS (SELECT 1 FROM responses WHERE prompt = prompts.id)",
                key,
            )

    # Reading

    def history(self, problem: Problem, limit: int = 0) -> list[Record]:
        """See Store."""
        among, key = _among(problem)
        rows = self._read(
            "SELECT tokens, epoch, reward, logprobs, generated FROM responses "
            f"WHERE prompt IN ({among}) ORDER BY epoch DESC, id DESC LIMIT ?",
            (*key, limit or -1),
        )
        return [Record(*row) for row in reversed(rows)]

    def newest_epochs(self) -> dict[str, int]:
        """See Store."""
        return dict(
            self._read(
                "SELECT namespace, max(epoch) FROM responses JOIN prompts ON prompts.id = prompt GROUP BY namespace"
            )
        )

    def estimators(self) -> dict[str, bytes]:
        """See Store."""
        return dict(self._read("SELECT namespace, CAST(state AS BLOB) FROM estimators"))

    def count(self) -> int:
        """See Store."""
        return int(self._read("SELECT count(*) FROM responses")[0][0])

    def load(self) -> Iterator[Batch]:
        """See Store."""
        newest = self._read("SELECT max(id) FROM responses")[0][0] or 0
        groups = self._read(
            "SELECT DISTINCT epoch, prompt FROM responses WHERE id <= ? ORDER BY epoch, prompt", (newest,)
        )
        for epoch, prompt in groups:
            rows = self._read(
                "SELECT tokens, epoch, reward, logprobs, generated FROM responses "
                "WHERE prompt = ? AND epoch = ? AND id <= ? ORDER BY id",
                (prompt, epoch, newest),
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
        """See Store."""
        self._writer.close()
        self._reader.close()
        os.close(self._lock)


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=8).digest()


def _among(problem: Problem) -> tuple[str, tuple[str | bytes, ...]]:
    """A query for the prompts of a problem, and its parameters: a named problem may have several prompts."""
    if problem.name:
        return "SELECT id FROM prompts WHERE namespace = ? AND problem = ?", (problem.namespace, problem.name)
    return (
        "SELECT id FROM prompts WHERE namespace = ? AND problem = '' AND digest = ? AND tokens = ?",
        (problem.namespace, _digest(problem.prompt), problem.prompt),
    )


def _explain(error: Exception) -> StoreError:
    text = str(error)
    if "full" in text:
        return StoreFull(f"store: the disk is full ({text}); free some room, nothing of this request was kept")
    return StoreError(f"store: {text}; nothing of this request was kept")


# Opening


def _lock(directory: Path) -> int:
    """A file descriptor whose lock keeps a second server out; the kernel lets go of it however this one ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"--data-dir {directory}: {error.strerror}; give a directory that can be written") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"--data-dir {directory}: another server uses it; stop that one or give another") from None
    return descriptor


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _open(path: Path) -> sqlite3.Connection:
    """Connects to the file, and brings its schema up to date."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables == 0 and application == 0:
            application, version = APPLICATION_ID, 0
        if application == APPLICATION_ID and version <= SCHEMA_VERSION:
            connection = _connect(path)
            if version < SCHEMA_VERSION:
                connection.executescript(
                    f"BEGIN; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
                    f"{''.join(SCHEMA[version:])} COMMIT;"
                )
            return connection
    except sqlite3.Error as error:
        raise ConfigError(f"--data-dir: {path} cannot be used as a store ({error}); give another directory") from None
    if application != APPLICATION_ID:
        raise ConfigError(f"--data-dir: {path} is another program's database; give another directory")
    raise ConfigError(
        f"--data-dir: {path} was written by a newer HistoSpec (schema {version}, this one knows {SCHEMA_VERSION}); "
        "upgrade this server or give another directory"
    )


def _recover(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """The connection without its failed transaction, or a new one where it does not come back."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        with suppress(sqlite3.Error):
            fresh = _connect(path)
            connection.close()
            return fresh
    return connection
