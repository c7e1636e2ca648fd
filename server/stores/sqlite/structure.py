"""Checks the structure of a SQLite file, also while the store is in use."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import structlog

from histospec.server.arguments import shown
from histospec.server.stores.sqlite.database import AGAIN_SECONDS, DAMAGE, connect_to_read, is_damage
from histospec.server.stores.sqlite.file import besides

log = structlog.get_logger()

LOG_CHECK_SECONDS = 0.5  # between checks of the write-ahead log's size
LOG_BYTES = 256 << 20  # of the write-ahead log; the check is not worth more


def structural_damage(connection: sqlite3.Connection) -> str:
    """Returns what is wrong with the structure of the file, or "". Raises sqlite3.Error if it is unreadable."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return "" if found == "ok" else f"malformed: {found}"


class StructureCheck:
    """One check of the structure of a whole file, in a thread, while the store is in use.

    It takes as long as the disk needs to read the file. It uses a separate connection: new writes do not wait, but stay
    in the write-ahead log until the check ends.
    """

    def __init__(self, path: Path, connect: Callable[[Path], sqlite3.Connection] = connect_to_read) -> None:
        self._path = path
        self._connect = connect
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # ended or cancelled
        self._left = threading.Event()  # the connection is no longer used and must not be interrupted
        self._given_up = False

    def start(self, found: Callable[[str], object]) -> None:
        """Starts the check, unless it has started before. Calls `found` with the reason if the file is damaged."""
        if self._thread is None and not self._done.is_set():
            self._thread = threading.Thread(target=self._run, args=(found,), name="structure", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Cancels the check. Blocks for a moment."""
        self._given_up = True
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, found: Callable[[str], object]) -> None:
        reason = failure = ""
        try:
            with closing(self._connect(self._path)) as connection, self._watched(connection):
                reason = structural_damage(connection)
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
        while not self._done.wait(LOG_CHECK_SECONDS):
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
            return besides(self._path)[1].stat().st_size
        return 0
