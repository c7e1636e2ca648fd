"""The file of the SQLite store: its schema, and who may open it."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from histospec.server.errors import ConfigError

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
    """
CREATE TABLE namespaces (
    namespace TEXT PRIMARY KEY,
    newest_epoch INTEGER NOT NULL
);
INSERT INTO namespaces
    SELECT namespace, max(epoch) FROM responses JOIN prompts ON prompts.id = prompt GROUP BY namespace;
INSERT OR IGNORE INTO namespaces SELECT namespace, 0 FROM estimators;
CREATE TABLE writes (  -- beside the prompts, whose rows are long
    prompt INTEGER PRIMARY KEY REFERENCES prompts (id),
    latest REAL NOT NULL  -- seconds since 1970
);
INSERT INTO writes SELECT id, strftime('%s', 'now') FROM prompts;
CREATE TRIGGER prompts_leave AFTER DELETE ON prompts BEGIN
    DELETE FROM responses WHERE prompt = old.id;
    DELETE FROM writes WHERE prompt = old.id;
END;
""",
    """
ALTER TABLE responses ADD COLUMN seed INTEGER;  -- NULL where nobody knows it
""",
)
SCHEMA_VERSION = len(SCHEMA)


def lock(directory: Path) -> int:
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


def connect(path: Path, disk: int | None = None) -> sqlite3.Connection:
    """A connection that writes durably, and lets the file grow to `disk` bytes at most."""
    connection = _plain(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if disk:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, disk // page)}")
    return connection


def open_file(path: Path) -> sqlite3.Connection:
    """Connects to the file, and brings its schema up to date."""
    with _usable(path):
        connection = _plain(path)
        version = _version(connection, path)
        connection = connect(path)
        if version < SCHEMA_VERSION:
            connection.executescript(
                f"BEGIN; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
                f"{''.join(SCHEMA[version:])} COMMIT;"
            )
        return connection


def open_snapshot(path: Path) -> sqlite3.Connection:
    """Connects to what the file holds at this moment, to read it, also while a server writes to it."""
    if not path.exists():
        raise ConfigError(f"--data-dir: there is no store at {path}; give the directory of one")
    with _usable(path):
        connection = _plain(f"{path.absolute().as_uri()}?mode=ro")
        connection.execute("BEGIN")
        version = _version(connection, path)
    if version < SCHEMA_VERSION:
        connection.close()  # it would keep a server from bringing the file up to date
        raise ConfigError(
            f"--data-dir: {path} was written by an older HistoSpec (schema {version}, this one needs "
            f"{SCHEMA_VERSION}); start this server on it once"
        )
    return connection


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise ConfigError(f"--data-dir: {path} cannot be used as a store ({error}); give another directory") from None


def _plain(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, uri=isinstance(path, str), isolation_level=None, check_same_thread=False, timeout=10)


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the schema; 0 where there is nothing yet. Raises ConfigError where the file is not for us."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables == 0 and application == 0:
        return 0
    if application != APPLICATION_ID:
        raise ConfigError(f"--data-dir: {path} is another program's database; give another directory")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"--data-dir: {path} was written by a newer HistoSpec (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade this server or give another directory"
        )
    return version


def recover(connection: sqlite3.Connection, path: Path, disk: int | None) -> sqlite3.Connection:
    """The connection without its failed transaction, or a new one where it does not come back."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        with suppress(sqlite3.Error):
            fresh = connect(path, disk)
            connection.close()
            return fresh
    return connection
