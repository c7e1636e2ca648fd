"""The files of the SQLite store: their lock, their identity and their size."""

import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from histospec.server.errors import ConfigError
from histospec.server.security import private

FILE_NAME = "histospec.sqlite"
LOCK_NAME = "lock"
OURS = ("lock", "histospec.sqlite*")  # the names of all files that the server creates in its directory
# Parts of SQLite's file format (https://sqlite.org/fileformat2.html, https://sqlite.org/walformat.html).
DATABASE_HEADER = struct.Struct(">16xH10xI")  # size of a page, number of pages
LOG_HEADER = struct.Struct("32x")
FRAME_HEADER = struct.Struct("24x")  # before each page in the log
INDEX_HEADER = struct.Struct("=12x?xHI12x8s8x")  # whether it is complete, size of a page, frames and salt of the log
NO_SALT = bytes(8)  # of a log without a readable header
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


class LogState(NamedTuple):
    """What SQLite recorded about the write-ahead log in the log's index."""

    frames: int
    """Frames up to the last commit."""
    frame: int
    """Bytes of a frame."""
    salt: bytes
    """Changes when SQLite begins the log anew."""

    def end(self, frames: int) -> int:
        """Returns how many bytes the log has with so many frames; 0 without one."""
        return LOG_HEADER.size + frames * self.frame if frames else 0

    @classmethod
    def of(cls, index: int) -> "LogState":
        """Reads it from an open file, of which SQLite may just write a new version."""
        head, copy = os.pread(index, INDEX_HEADER.size, 0), os.pread(index, INDEX_HEADER.size, INDEX_HEADER.size)
        if len(head) < INDEX_HEADER.size or head != copy:
            return cls(0, 0, NO_SALT)
        initialized, page, frames, salt = INDEX_HEADER.unpack(head)
        size = 1 << 16 if page == 1 else page
        return cls(frames if initialized else 0, FRAME_HEADER.size + size, salt)


class Files:
    """Detects changes to the files of an open store.

    Compares what the names lead to, but only after their directory has changed: a stat of the write-ahead log between
    two writes makes the next sync a third slower, because the kernel then has to write a new timestamp. Compares the
    sizes of the open files, which costs no timestamp.

    Create it while the store has the files open, and close it after the store: closing a descriptor releases SQLite's
    own locks.
    """

    def __init__(self, path: Path) -> None:
        self._paths = [str(file) for file in besides(path)]
        self._parent = str(path.parent)
        self._were = [_identity(path) for path in self._paths]
        self._directory: tuple[int, ...] = ()  # stamp at the last check, if it will reveal the next change
        self._lock = threading.Lock()
        self._descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._paths if os.path.exists(path)]
        self._size = os.stat(path).st_size if self._were[0] else 0  # the largest of the database
        self._frames = 0  # of the log at the last check
        self._cut = ""

    def cut(self) -> str:
        """Returns which file has lost bytes that the server wrote, although it is still the same file; empty if none.

        Compares with what the files themselves say, because another program may rightly shrink them.
        """
        with self._lock:
            if not self._cut and len(self._descriptors) == len(self._paths):
                self._cut = self._find_cut(*self._descriptors)
            return self._cut

    def _find_cut(self, database: int, log: int, index: int) -> str:
        size = os.lseek(database, 0, os.SEEK_END)
        if size < self._size:
            head = os.pread(database, DATABASE_HEADER.size, 0)
            page, pages = DATABASE_HEADER.unpack(head) if len(head) == DATABASE_HEADER.size else (0, 0)
            if not page or size < pages * (1 << 16 if page == 1 else page):
                return f"{self._paths[0]} was cut from {self._size} to {size} bytes"
        self._size = size
        state = LogState.of(index)
        logged = os.lseek(log, 0, os.SEEK_END)
        if logged < state.end(state.frames):
            return f"{self._paths[1]} was cut from {state.end(state.frames)} to {logged} bytes"
        # If the log was cut between a check and a write, it has a hole where the frames before the write were.
        before, self._frames = self._frames, state.frames
        if 0 < before < state.frames and not any(
            os.pread(log, FRAME_HEADER.size, state.end(before - 1) or LOG_HEADER.size)
        ):
            return f"{self._paths[1]} was cut below {state.end(before)} bytes"
        return ""

    def close(self) -> None:
        """Closes its descriptors."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.pop())

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
