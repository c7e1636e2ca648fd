"""Files that only the server's own user may read, whatever the umask, in folders whose names survive a crash."""

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

FILE, DIRECTORY = 0o600, 0o700
_SHARED = stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=...)`: a file that is made is private from its first byte on."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE)
    with suppress(OSError):  # another user's file stays as it is
        os.fchmod(descriptor, FILE)
    return descriptor


def create(path: Path) -> None:
    """Makes an empty private file where there is none."""
    with suppress(FileExistsError):
        os.close(opener(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL))


def tighten(paths: Iterable[Path]) -> None:
    """Takes everyone else's rights from those of the files that exist and belong to this user."""
    for path in paths:
        with suppress(OSError):
            if stat.S_IMODE(path.stat().st_mode) != FILE:
                path.chmod(FILE)


def directory(path: Path, ours: Sequence[str]) -> None:
    """Makes the directory private where this call creates it, or where it holds files of these names alone.

    A directory that others may write to, as Kubernetes sets one up with `fsGroup`, keeps its rights, and so does one
    with other files in it. Raises OSError where it cannot be made.
    """
    made = not path.exists()
    path.mkdir(DIRECTORY, parents=True, exist_ok=True)
    with suppress(OSError):
        mode = path.stat().st_mode
        alone = all(any(fnmatchcase(name, pattern) for pattern in ours) for name in os.listdir(path))
        if (made or (alone and not mode & _SHARED)) and stat.S_IMODE(mode) != DIRECTORY:
            path.chmod(DIRECTORY)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a crash. Raises OSError."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
