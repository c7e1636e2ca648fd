"""The database of the SQLite store: its schema, and connections to it."""

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from histospec.server.errors import ConfigError
from histospec.server.security import private
from histospec.server.stores.sqlite.file import NO_SALT, LogState, besides

DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of reading a damaged file; their texts may quote bytes of the file."""
AGAIN_SECONDS = 0.01  # between interrupts: SQLite ignores one that comes before a statement starts

APPLICATION_ID = 0x48495354  # "HIST"
_MAGIC = b"SQLite format 3\0"  # its first bytes
_ID_AT = 68  # where a SQLite file has its application id
UNUSABLE = "give another directory, or move the file away if it was a store"
VERSION = 1
"""The version of the schema. A change of the schema takes the next number."""

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
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
    seed INTEGER,
    checksum INTEGER NOT NULL,  -- of all other columns except the id
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    generated BLOB NOT NULL,
    alternatives BLOB NOT NULL
);
CREATE INDEX responses_by_prompt ON responses (prompt, epoch);
CREATE TABLE writes (  -- beside the prompts, whose rows are long
    prompt INTEGER PRIMARY KEY REFERENCES prompts (id),
    latest REAL NOT NULL  -- seconds since 1970
);
CREATE TRIGGER prompts_leave AFTER DELETE ON prompts BEGIN
    DELETE FROM responses WHERE prompt = old.id;
    DELETE FROM writes WHERE prompt = old.id;
END;
CREATE TABLE namespaces (
    namespace TEXT PRIMARY KEY,
    newest_epoch INTEGER NOT NULL
);
CREATE TABLE estimators (
    namespace TEXT PRIMARY KEY,
    state BLOB NOT NULL
);
CREATE TABLE leaving (  -- responses that a drop or a rewind takes out, a few at a time
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL,
    epoch INTEGER NOT NULL,    -- those of newer epochs leave ...
    response INTEGER NOT NULL  -- ... whose id is not above this one
);
CREATE TABLE clock (  -- one row: how far the times in `writes` can be trusted
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seen REAL NOT NULL,       -- the latest time of day that a server with a retention has seen
    since REAL NOT NULL,      -- from when to `seen` the time of day went on evenly
    forgotten REAL NOT NULL,  -- problems that retention forgot in the hour before `seen`
    paused TEXT NOT NULL      -- why retention waits for a person, or ''
);
"""


def open_store_file(path: Path, disk: int | None = None) -> sqlite3.Connection:
    """Connects a server to its file, of at most `disk` bytes; creates the file if it does not exist.

    Raises ConfigError if the file cannot be used.
    """
    with usable(path):
        if not path.exists():
            _create(path)
        private.tighten(besides(path))
        with closing(connect_to_read(path)) as reader:  # closing a writer would move the write-ahead log
            version = version_of(reader, path)
        if version == 0:
            raise sqlite3.DatabaseError("malformed: it has no tables")
        return connect(path, disk)


def _create(path: Path) -> None:
    """Creates an empty store. It gets its name when it is complete, so an empty file has lost its contents."""
    unfinished = path.with_name(f"{path.name}.creating")
    for file in besides(unfinished):
        file.unlink(missing_ok=True)
    private.create(unfinished)
    with closing(connect(unfinished)) as connection:  # closing moves the write-ahead log into the file
        connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
    for file in besides(path)[1:]:  # a log of a file that is gone does not belong to the new one
        file.unlink(missing_ok=True)
    unfinished.rename(path)
    private.sync_folder(path.absolute().parent)


def open_existing(path: Path, write: bool = False) -> sqlite3.Connection:
    """Connects to the file of an existing store, also while a server writes to it.

    A reader sees the contents at this moment. Raises ConfigError if there is no store, or one of another version.
    """
    if path.exists():
        with usable(path), ExitStack() as unless_used:
            connection = unless_used.enter_context(closing(connect(path) if write else connect_to_read(path)))
            if not write:
                connection.execute("BEGIN")
            if version_of(connection, path):
                unless_used.pop_all()
                return connection
    raise ConfigError(f"--data-dir: there is no store at {path}; give the directory of an existing store")


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Returns the version of the schema; 0 for an empty file.

    Raises ConfigError if the file has another version or belongs to another program. A migration would go here: return
    the versions that `open_store_file` can bring up to date.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application == APPLICATION_ID and version != VERSION:
        raise ConfigError(
            f"--data-dir: {path} was written by another version of HistoSpec (schema {version}, this server needs "
            f"{VERSION}); take a snapshot with that version (histospec snapshot), give another directory, and restore "
            "the snapshot with this one (histospec restore)"
        )
    if application == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return 0
    if application != APPLICATION_ID:
        raise ConfigError(f"--data-dir: {path} is another program's database; {UNUSABLE}")
    return version


def digest_of(tokens: bytes) -> bytes:
    """Returns 8 bytes that narrow the search for a prompt."""
    return hashlib.blake2b(tokens, digest_size=8).digest()


def connect(path: Path, disk: int | None = None) -> sqlite3.Connection:
    """Returns a connection that writes durably and limits the file to `disk` bytes."""
    connection = _plain(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = FAST")  # otherwise some builds overwrite every freed page with zeros
    if disk:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, disk // page)}")
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Returns a connection that never writes to the file nor moves the write-ahead log into it."""
    return _plain(f"{path.absolute().as_uri()}?mode=ro")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _plain(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, uri=isinstance(path, str), isolation_level=None, check_same_thread=False, timeout=10
    )
    connection.text_factory = _text  # one damaged text must not make a whole page of rows unreadable
    return connection


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turns SQLite's errors about the file into a ConfigError, except damage to a file of ours."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error) and is_ours(path):
            raise
        if "full" in str(error):
            raise ConfigError(f"--data-dir: {path} cannot be opened: {error}; free some space") from None
        raise ConfigError(f"--data-dir: {path} cannot be used as a store ({error}); {UNUSABLE}") from None


def is_damage(error: BaseException) -> bool:
    """Returns whether SQLite says that the file is damaged. A schema that lacks a table or a column is damaged, too."""
    texts = ("malformed", "not a database", "no such table", "no such column")
    return isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.DatabaseError) and any(text in str(error) for text in texts)
    )


def is_ours(path: Path) -> bool:
    """Returns whether the first bytes of the file say that it is a store. Only for files that are not open here.

    A file that is too short to say so is one that was cut, unless it begins as no SQLite file does.
    """
    with suppress(OSError), path.open("rb") as file:
        head = file.read(_ID_AT + 4)
        if len(head) < _ID_AT + 4:
            return head[: len(_MAGIC)] == _MAGIC[: len(head)]
        return head[_ID_AT:] == APPLICATION_ID.to_bytes(4, "big")
    return False


def damaged_log(path: Path) -> str:
    """Returns that the write-ahead log of a stopped server lacks committed data; empty if it does not.

    The server syncs the log before it notes the commit in the index, so the index is never ahead of a whole log. SQLite
    reads a log up to its first damaged frame, and reports no error.
    """
    _, log, index = besides(path)
    with suppress(OSError, *DAMAGE), index.open("rb") as file:
        noted = LogState.of(file.fileno())
        size, whole = log.stat().st_size if log.exists() else 0, noted.end(noted.frames)
        if size < whole:
            return f"malformed: {log} was cut to {size} bytes, of {whole}"
        with closing(connect_to_read(path)) as reader:
            reader.execute("PRAGMA schema_version").fetchone()  # the first connection makes the index again
            found = LogState.of(file.fileno())
        if found.frames < noted.frames and found.salt in (noted.salt, NO_SALT):
            return f"malformed: {log} can be read up to frame {found.frames}, of {noted.frames}"
    return ""


def free_bytes(connection: sqlite3.Connection) -> int:
    """Returns the bytes of free pages, which new data can reuse; 0 if they cannot be counted."""
    try:
        (pages,) = connection.execute("PRAGMA freelist_count").fetchone()
        (page,) = connection.execute("PRAGMA page_size").fetchone()
    except sqlite3.Error:  # the file is damaged; committed data stays committed
        return 0
    return int(pages * page)


def recover(connection: sqlite3.Connection, path: Path, disk: int | None) -> sqlite3.Connection:
    """Rolls back the failed transaction. Returns the connection, or a new one if the rollback fails."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        with suppress(sqlite3.Error):
            fresh = connect(path, disk)
            connection.close()
            return fresh
    return connection


class Readers:
    """Lends connections, each to one thread at a time. Thread-safe.

    They are opened in advance: a connection opened later may find another file under the name, or none.
    """

    def __init__(self, connections: Iterable[sqlite3.Connection] = ()) -> None:
        self._changed = threading.Condition()
        self._idle = list(connections)
        self._lent: set[sqlite3.Connection] = set()
        self._away = self._closed = False
        self.generation = 0
        """How many times all connections were replaced: those of another generation read another file."""

    def add(self, connection: sqlite3.Connection) -> None:
        """Adds a connection to lend."""
        with self._changed:
            self._idle.append(connection)

    @contextmanager
    def one(self) -> Iterator[sqlite3.Connection]:
        """Lends a connection for the duration of the block. Raises sqlite3.Error once they are closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._idle and not self._away))
            if self._closed:
                raise sqlite3.ProgrammingError("the store is closed")
            connection = self._idle.pop()
            self._lent.add(connection)
        try:
            yield connection
        finally:
            with self._changed:
                self._lent.discard(connection)
                self._idle.append(connection)
                self._changed.notify_all()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Waits for all readers, and lends nothing during the block, which may `end` connections and `add` others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away)
            self._away = True
            self._changed.wait_for(lambda: not self._lent)
        try:
            yield
        finally:
            with self._changed:
                self.generation += 1
                self._away = False
                self._changed.notify_all()

    def end(self) -> None:
        """Closes the connections, none of which is lent."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Interrupts running reads and closes the connections. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._lent:
                for connection in self._lent:
                    connection.interrupt()
                self._changed.wait(AGAIN_SECONDS)
            self.end()
