"""Files that a command writes: what cannot be written is said before the work, and a name gets whole files only."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from histospec.server.errors import ConfigError, HistoSpecError
from histospec.server.failures import reason
from histospec.server.security.private import sync_folder

STANDARD = ("-", "/dev/stdout")
DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/")
FORCE = "write also through a symlink, or into a device or a pipe"
DATABASE = b"SQLite format 3\0"


class TargetError(HistoSpecError):
    """A file could not be written to its end."""


def is_stdout(name: str) -> bool:
    """Whether it names the standard output."""
    return name in STANDARD


@contextmanager
def written(name: str, *, force: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """The file of this name, to be written. A regular one gets its name when all of it is on the disk.

    force: also through a symlink, or into a device or a pipe. private: nobody else may read it.

    Raises:
        ConfigError: nothing can be written there; before anything is.
        TargetError: what could be written is not all of it.
    """
    if is_stdout(name):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif name.startswith(DESCRIPTORS):  # inherited, such as `>(gzip > file)`
        with _straight(Path(name)) as file:
            yield file
    else:
        regular = _kind(name, force) in (0, stat.S_IFREG)
        with _replaced(Path(os.path.realpath(name)), private) if regular else _straight(Path(name)) as file:
            yield file


def _kind(name: str, force: bool) -> int:
    """What is there, by its type of file; 0 for nothing. Raises ConfigError where it is not to be written to."""
    path = Path(name)
    try:
        if path.is_symlink() and not force:
            raise ConfigError(f"{name} is a symlink; give the file itself, or --force to write what it points to")
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"{name}: {reason(error)}; give a file that can be written") from None
    if kind == stat.S_IFDIR:
        raise ConfigError(f"{name} is a directory; give the name of a file")
    if kind != stat.S_IFREG and not force:
        raise ConfigError(f"{name} is a device or a pipe; give the name of a file, or --force to write into it")
    if kind == stat.S_IFREG and _is_database(path):
        raise ConfigError(f"{name} is a database; give the name of another file")
    return kind


def _is_database(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(DATABASE)) == DATABASE
    return False


@contextmanager
def _straight(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"{path}: {reason(error)}; give a file that can be written") from None
    try:
        with file:
            yield file
    except OSError as error:
        if error.filename is not None:  # of something else
            raise
        raise TargetError(f"{path}: {reason(error)}") from None


@contextmanager
def _replaced(path: Path, private: bool) -> Iterator[BinaryIO]:
    """A file of another name beside it, which takes its place at the end."""
    try:
        number, partial = tempfile.mkstemp(".partial", f"{path.name}.", path.parent)
    except OSError as error:
        text = f"{path}: cannot make a file in this folder: {reason(error)}; give a file that can be written"
        raise ConfigError(text) from None
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            if not private:
                os.fchmod(number, 0o666 & ~_umask())
            os.fsync(number)
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename not in (None, partial):  # of something else
            raise
        raise TargetError(f"{path}: {reason(error)}; it is as it was") from None
    finally:
        with suppress(OSError):
            os.unlink(partial)


def _umask() -> int:
    """What new files are not to allow; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
