"""Checks the structure of a whole file while the store is in use.

That takes as long as the disk needs to read the file. It uses a separate connection: new writes do not wait, but stay
in the write-ahead log until the check ends.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import structlog

from histospec.server.arguments import shown
from histospec.server.stores.sqlite.file import DAMAGE, besides, is_damage
from histospec.server.stores.sqlite.readers import AGAIN_SECONDS

log = structlog.get_logger()

LOOK_SECONDS = 0.5  # between checks of the write-ahead log's size
LOG_BYTES = 256 << 20  # of the write-ahead log; the check is not worth more


class Structure:
    """One check of the structure, in a thread.

    Args:
        path: of the file, to find the size of its log.
        connect: opens a connection that reads the file.

    """

    def __init__(self, path: Path, connect: Callable[[], sqlite3.Connection]) -> None:
        self._log = besides(path)[1]
        self._connect = connect
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # ended or cancelled
        self._left = threading.Event()  # the connection is no longer used and must not be interrupted
        self._given_up = False

    def look(self, found: Callable[[str], object]) -> None:
        """Starts the check, unless it has started before. Calls `found` with the reason if the file is damaged."""
        if self._thread is None and not self._done.is_set():
            self._thread = threading.Thread(target=self._look, args=(found,), name="structure", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Cancels the check. Blocks for a moment."""
        self._given_up = True
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, found: Callable[[str], object]) -> None:
        reason = failure = ""
        try:
            with closing(self._connect()) as connection, self._watched(connection):
                reason = problem(connection)
        except DAMAGE as error:
            if is_damage(error):
                reason = str(error)
            else:
                failure = str(error)
        if self._given_up:  # pages that SQLite did not reach look damaged
            return
        if failure:
            log.warning("the structure of the store cannot be checked", reason=failure)
        if reason:
            found(reason)

    @contextmanager
    def _watched(self, connection: sqlite3.Connection) -> Iterator[None]:
        watch = threading.Thread(target=self._watch, args=(connection,), name="structure watch", daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._left.set()
            self._done.set()
            watch.join()

    def _watch(self, connection: sqlite3.Connection) -> None:
        while not self._done.wait(LOOK_SECONDS):
            if self._log_bytes() > LOG_BYTES:
                self._given_up = True
                reason = f"more than {shown(LOG_BYTES)} were written meanwhile; checksums still protect responses"
                log.warning("the structure of the store is not checked to the end", reason=reason)
                break
        while not self._left.is_set():
            connection.interrupt()
            self._left.wait(AGAIN_SECONDS)

    def _log_bytes(self) -> int:
        with suppress(OSError):
            return self._log.stat().st_size
        return 0


def problem(connection: sqlite3.Connection) -> str:
    """Returns what is wrong with the structure of the file, or "". Raises sqlite3.Error if it is unreadable."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return "" if found == "ok" else f"malformed: {found}"
