"""Files that only the server's user may read, whatever the umask, in folders whose entries survive a crash."""

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

FILE, DIRECTORY = 0o600, 0o700
_SHARED = stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH


def opener(path: str, flags: int) -> int:
    """Opens a file for `open(..., opener=...)`: a new file is private from its first byte."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE)
    with suppress(OSError):  # a file of another user keeps its permissions
        os.fchmod(descriptor, FILE)
    return descriptor


def create(path: Path) -> None:
    """Creates an empty private file if there is none."""
    with suppress(FileExistsError):
        os.close(opener(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL))


def tighten(paths: Iterable[Path]) -> None:
    """Removes the permissions of other users from those files that exist and belong to this user."""
    for path in paths:
        with suppress(OSError):
            if stat.S_IMODE(path.stat().st_mode) != FILE:
                path.chmod(FILE)


def directory(path: Path, ours: Sequence[str]) -> None:
    """Makes the directory private if this call creates it, or if it holds only files with these names.

    A directory that others may write to, as Kubernetes makes with `fsGroup`, keeps its permissions. So does one with
    other files. Raises OSError if the directory cannot be created.
    """
    made = not path.exists()
    path.mkdir(DIRECTORY, parents=True, exist_ok=True)
    with suppress(OSError):
        mode = path.stat().st_mode
        alone = all(any(fnmatchcase(name, pattern) for pattern in ours) for name in os.listdir(path))
        if (made or (alone and not mode & _SHARED)) and stat.S_IMODE(mode) != DIRECTORY:
            path.chmod(DIRECTORY)


def sync_folder(folder: Path) -> None:
    """Makes the entries of a folder survive a crash. Raises OSError."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
