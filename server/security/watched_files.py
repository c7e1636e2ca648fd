"""Small files that people write by hand, such as tokens: read whole, and again when they change.

Devices and oversized files are refused.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

from histospec.server.errors import ConfigError
from histospec.server.logs.lines import Throttle

log = structlog.get_logger()
T = TypeVar("T")

LONGEST = 16 << 20  # bytes of a file
UNREADABLE = (OSError, ValueError, ConfigError)
SETTLED_NS = 2_000_000_000  # file systems count time in steps of up to 2 s: a younger change may hide a later one
LOG_SECONDS = 60.0  # seconds between two log lines about the same failure


def read_bytes(path: Path) -> bytes:
    """Returns the whole file. Raises OSError, also if it is longer than LONGEST."""
    with path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_text(path: Path) -> str:
    """Returns the whole file as text. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path).decode()


class _State(NamedTuple):
    """The properties that tell one version of a file from another."""

    inode: int
    size: int
    modified: int
    changed: int
    """Changes with the permissions, too."""


class Watched(Generic[T]):
    """The value that `read` last made of some files.

    Args:
        name: what the files hold, for the log, the metrics and the status page.
        paths: the files.
        read: raises OSError, ValueError or ConfigError if the files cannot be used; the constructor raises it, too.
        words: turns such an error into text without secrets.

    """

    def __init__(
        self, name: str, paths: Iterable[Path], read: Callable[[], T], words: Callable[[Exception], str] = str
    ) -> None:
        self.name = name
        self._paths = tuple(paths)
        self._read = read
        self._words = words
        self._lock = threading.Lock()
        self._throttle = Throttle(1, LOG_SECONDS)
        self._seen: list[_State] | None = None  # the first look reads again: the files may change right now
        self.value = read()
        self.version = 0
        """Grows whenever `value` changes."""
        self.failure = ""
        """Why the current files cannot be used; the previous contents stay in force."""

    def look(self) -> T:
        """Returns the current value. Reads the files if they have changed or could not be read before."""
        with self._lock:
            try:
                self._look()
            except UNREADABLE as error:
                self._seen = None
                self.failure = self._words(error)
                if (more := self._throttle.admits("failure")) is not None:
                    files = [str(path) for path in self._paths]
                    text = f"{self.name} cannot be read; the old ones stay, and the files are tried again"
                    log.error(text, files=files, reason=self.failure, **more)
            return self.value

    def _look(self) -> None:
        states = [_state(path) for path in self._paths]  # before reading: the next look sees later changes
        if states == self._seen:
            return
        value = self._read()
        newest = max(max(state.modified, state.changed) for state in states)
        self._seen = states if newest < time.time_ns() - SETTLED_NS else None
        if self.failure or value != self.value:
            log.info(f"{self.name} read again", files=[str(path) for path in self._paths])
        if value != self.value:
            self.value = value
            self.version += 1
        self.failure = ""


def _state(path: Path) -> _State:
    state = path.stat()
    return _State(state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
