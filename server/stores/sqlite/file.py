"""The files of the SQLite store: their lock, their identity and their size."""

import errno
import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from histospec.server.errors import ConfigError
from histospec.server.security import private

FILE_NAME = "histospec.sqlite"
LOCK_NAME = "lock"
OURS = ("lock", "histospec.sqlite*")  # the names of all files that the server creates in its directory
COARSE_SECONDS = 2.0  # a file system may give two changes within this time the same timestamp


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


def volume_space(directory: Path) -> tuple[int, int] | None:
    """Returns the free and total bytes of the volume of a directory; None if unknown."""
    try:
        total, _, free = shutil.disk_usage(directory)
    except OSError:
        return None
    return free, total
