"""The file of the SQLite store: its lock, its checks, and its connections."""

import errno
import fcntl
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from histospec.server.errors import ConfigError
from histospec.server.security import private
from histospec.server.stores.sqlite.schema import APPLICATION_ID, SCHEMA_VERSION

FILE_NAME = "histospec.sqlite"
LOCK_NAME = "lock"
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of reading a damaged file; their texts may quote bytes of the file."""
OURS = ("lock", "histospec.sqlite*")  # the names of all files that the server creates in its directory
COARSE_SECONDS = 2.0  # a file system may give two changes within this time the same timestamp
_ID_AT = 68  # where a SQLite file has its application id


def besides(path: Path) -> tuple[Path, Path, Path]:
    """Returns the paths of the database, its write-ahead log and the log's index."""
    return path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")


class Lock:
    """Keeps a second server out of a directory. The kernel releases it however this process ends.

    Locks both the directory and a file in it: the file alone could be replaced unnoticed, and not every file system can
    lock directories. Raises ConfigError.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptors: list[int] = []
        try:
            private.directory(directory, OURS)
            self._descriptors.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            file = private.opener(str(directory / LOCK_NAME), os.O_RDWR | os.O_CREAT)
            self._descriptors.append(file)
        except OSError as error:
            self.release()
            raise ConfigError(
                f"--data-dir {directory}: {error.strerror}; give a directory that can be written"
            ) from None
        try:
            for descriptor in self._descriptors:
                self._take(descriptor, required=descriptor == file)
        except OSError:
            self.release()
            raise ConfigError(
                f"--data-dir {directory}: another server uses it; stop that one or give another"
            ) from None

    @staticmethod
    def _take(descriptor: int, required: bool) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if required or error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise

    def release(self) -> None:
        """Releases the lock."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class Files:
    """Detects changes to the files of an open store.

    It compares what the names lead to, and opens nothing: closing a second descriptor would release SQLite's own locks.
    It checks the files only after their directory has changed: a stat of the write-ahead log between two writes makes
    the next sync a third slower, because the kernel then has to write a new timestamp.
    """

    def __init__(self, path: Path) -> None:
        self._paths = [str(file) for file in besides(path)]
        self._parent = str(path.parent)
        self._were = [_identity(path) for path in self._paths]
        self._directory: tuple[int, ...] = ()  # stamp at the last check, if it will reveal the next change

    def changed(self) -> str:
        """Returns which file is gone or was replaced; empty if none. Data written after such a change would be lost."""
        directory = _stamp(self._parent)
        if directory and directory == self._directory:
            return ""
        for path, was in zip(self._paths, self._were, strict=True):
            now = _identity(path)
            if now != was:
                self._directory = ()
                return f"{path} was {'replaced' if now else 'deleted or moved'} while the server has it open"
        self._directory = directory
        return ""


def _stamp(directory: str) -> tuple[int, ...]:
    """Returns a stamp that changes with the names in a directory; empty if it may miss a change right now."""
    try:
        found = os.stat(directory)
    except OSError:
        return ()
    if abs(time.time() - found.st_mtime) < COARSE_SECONDS:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def written_bytes(path: Path) -> int | None:
    """Returns the bytes of a database and its write-ahead log; None if it does not exist."""
    database, log, _ = besides(path)
    try:
        size = database.stat().st_size
    except OSError:
        return None
    with suppress(OSError):  # without a connection there is no log
        size += log.stat().st_size
    return size


def free_bytes(connection: sqlite3.Connection) -> int:
    """Returns the bytes of free pages, which new data can reuse; 0 if they cannot be counted."""
    try:
        (pages,) = connection.execute("PRAGMA freelist_count").fetchone()
        (page,) = connection.execute("PRAGMA page_size").fetchone()
    except sqlite3.Error:  # the file is damaged; committed data stays committed
        return 0
    return int(pages * page)


def room(directory: Path) -> tuple[int, int] | None:
    """Returns the free and total bytes of the volume of a directory; None if unknown."""
    try:
        total, _, free = shutil.disk_usage(directory)
    except OSError:
        return None
    return free, total


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


def open_existing(path: Path, write: bool = False) -> sqlite3.Connection:
    """Connects to the file of an existing store, also while a server writes to it.

    A reader sees the contents at this moment. Raises ConfigError if there is no store, or only one of an older
    version.
    """
    if not path.exists():
        raise ConfigError(f"--data-dir: there is no store at {path}; give the directory of an existing store")
    with usable(path):
        connection = connect(path) if write else connect_to_read(path)
        if not write:
            connection.execute("BEGIN")
        version = version_of(connection, path)
    if version < SCHEMA_VERSION:
        connection.close()  # it would keep a server from migrating the file
        raise ConfigError(
            f"--data-dir: {path} was written by an older HistoSpec (schema {version}, this one needs "
            f"{SCHEMA_VERSION}); start this server on it once"
        )
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
        raise ConfigError(f"--data-dir: {path} cannot be used as a store ({error}); give another directory") from None


def is_damage(error: BaseException) -> bool:
    """Returns whether SQLite says that the file is damaged."""
    return isinstance(error, UnicodeDecodeError) or (
        isinstance(error, sqlite3.DatabaseError) and any(text in str(error) for text in ("malformed", "not a database"))
    )


def is_ours(path: Path) -> bool:
    """Returns whether the first bytes of the file say that it is a store. Only for files that are not open here."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(_ID_AT)
        return file.read(4) == APPLICATION_ID.to_bytes(4, "big")
    return False


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _plain(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, uri=isinstance(path, str), isolation_level=None, check_same_thread=False, timeout=10
    )
    connection.text_factory = _text  # one damaged text must not make a whole page of rows unreadable
    return connection


def version_of(connection: sqlite3.Connection, path: Path, known: int = SCHEMA_VERSION) -> int:
    """Returns the version of the schema; 0 for an empty file.

    Raises ConfigError if this server cannot use the file: it belongs to another program, or needs servers that know
    a version above `known`.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables == 0 and application == 0:
        return 0
    if application != APPLICATION_ID:
        raise ConfigError(f"--data-dir: {path} is another program's database; give another directory")
    if version > known and (least := _readable_from(connection, version)) > known:
        copy = max((copy for copy in copies_of(path).items() if copy[0] <= known), default=None)
        back = (
            f"or restore the copy from before the upgrade, without what was stored since: {_put_back(copy[1], path)}"
            if copy
            else "or give another directory"
        )
        raise ConfigError(
            f"--data-dir: {path} was written by a newer HistoSpec (schema {version}, this one knows {known}, and the "
            f"file needs {least}); upgrade this server, {back}"
        )
    return version


def _readable_from(connection: sqlite3.Connection, version: int) -> int:
    """Returns the oldest version whose servers can use the file, as a newer server recorded; else its own version."""
    with suppress(sqlite3.OperationalError):  # no such table
        for (least,) in connection.execute("SELECT readable_from FROM compatibility WHERE version = ?", (version,)):
            return int(least)
    return version


def copies_of(path: Path) -> dict[int, Path]:
    """Returns the copies kept for older servers, by schema version."""
    found = {}
    for file in path.parent.glob(f"{path.name}.v*"):
        if match := re.fullmatch(r".*\.v([0-9]+)", file.name):
            found[int(match[1])] = file
    return found


def _put_back(copy: Path, path: Path) -> str:
    """Returns the shell commands that restore a copy. They remove the newer file's write-ahead log."""
    _, log, index = besides(path)
    return f"rm -f {log} {index} && mv {copy} {path}"


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
