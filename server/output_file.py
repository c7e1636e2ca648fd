"""Files that a command writes: errors appear before the work starts, and a name only ever points to a whole file."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from histospec.server.errors import ConfigError, HistoSpecError, reason
from histospec.server.security.private import sync_folder

STANDARD = ("-", "/dev/stdout")
DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/")
FORCE = "also write through a symlink, or into a device or a pipe"
DATABASE = b"SQLite format 3\0"


class OutputError(HistoSpecError):
    """A file could not be written completely."""


def is_stdout(name: str) -> bool:
    """Returns whether `name` is the standard output."""
    return name in STANDARD


def keep_apart(outputs: Iterable[tuple[str, str | None]], inputs: Iterable[tuple[str, str | None]]) -> None:
    """Checks that no output of a command is one of its inputs, or another output. Raises ConfigError.

    Call it before `written`. Each is an option and the file that it names; None if it names none.
    """
    read = {_identity(name, 0): option for option, name in inputs if name}
    taken: dict[object, str] = {}
    for option, name in outputs:
        file = _identity(name, 1) if name else None
        if file is None:
            continue
        if file in read:
            raise ConfigError(f"{option} {name} is the file that {read[file]} reads; give the name of another file")
        if file in taken:
            where = "standard output" if name and is_stdout(name) else name
            raise ConfigError(f"{taken[file]} and {option} both write to {where}; give one of them a file of its own")
        taken[file] = option


def _identity(name: str, standard: int) -> object:
    """Returns what all names of one file have in common; None for devices and pipes, except the standard output.

    `standard`: the descriptor that `-` stands for.
    """
    try:
        status = os.stat(standard if name == "-" else name)
    except OSError:
        return os.path.realpath(name)
    if stat.S_ISREG(status.st_mode):
        return status.st_dev, status.st_ino
    return STANDARD if standard == 1 and is_stdout(name) else None


@contextmanager
def written(name: str, *, force: bool = False, private: bool = False) -> Iterator[BinaryIO]:
    """Opens a file for writing. A regular file gets its name once all of it is on disk.

    `force`: also write through a symlink, or into a device or a pipe. `private`: only this user may read the file.

    Raises:
        ConfigError: the file cannot be written; raised before any write.
        OutputError: the file was not written completely.
    """
    if is_stdout(name):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif name.startswith(DESCRIPTORS):  # an inherited descriptor, such as `>(gzip > file)`
        with _straight(Path(name)) as file:
            yield file
    else:
        regular = _kind(name, force) in (0, stat.S_IFREG)
        with _replaced(Path(os.path.realpath(name)), private) if regular else _straight(Path(name)) as file:
            yield file


def _kind(name: str, force: bool) -> int:
    """Returns the type of the existing file, 0 if there is none. Raises ConfigError if it must not be written."""
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
        if error.filename is not None:  # the error is about another file
            raise
        raise OutputError(f"{path}: {reason(error)}") from None


@contextmanager
def _replaced(path: Path, private: bool) -> Iterator[BinaryIO]:
    """Writes a temporary file in the same folder, which replaces `path` at the end."""
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
        if error.filename not in (None, partial):  # the error is about another file
            raise
        raise OutputError(f"{path}: {reason(error)}; the file is unchanged") from None
    finally:
        with suppress(OSError):
            os.unlink(partial)


def _umask() -> int:
    """Returns the permissions that new files lack. The only way to read the umask is to set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
