"""Files that may change while the server runs: read again until what is on the disk is what is in force."""

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

UNREADABLE = (OSError, ValueError, ConfigError)
SETTLED_NS = 2_000_000_000  # file systems count time in steps of up to two seconds: a younger change may hide another
SAID_EVERY = 60.0  # seconds between two lines about one failure


class _State(NamedTuple):
    """What tells one version of a file from another."""

    inode: int
    size: int
    modified: int
    changed: int
    """Changes with the permissions, too."""


class Watched(Generic[T]):
    """What `read` makes of some files, as they were when it last could.

    Args:
        name: what the files hold, for the log, the metrics and the status page.
        paths: the files.
        read: raises OSError, ValueError or ConfigError where they cannot be used, at first out of this call.
        words: what is wrong, from such an error, without secrets.

    """

    def __init__(
        self, name: str, paths: Iterable[Path], read: Callable[[], T], words: Callable[[Exception], str] = str
    ) -> None:
        self.name = name
        self._paths = tuple(paths)
        self._read = read
        self._words = words
        self._lock = threading.Lock()
        self._throttle = Throttle(1, SAID_EVERY)
        self._seen: list[_State] | None = None  # the first look reads again: the files may change right now
        self.value = read()
        self.version = 0
        """Grows whenever `value` becomes another."""
        self.failure = ""
        """Why the files as they are now cannot be used; what they held before is in force."""

    def look(self) -> T:
        """What the files hold now. They are read where they have changed, and where they could not be read before."""
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
        states = [_state(path) for path in self._paths]  # before they are read: what changes meanwhile shows next time
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
