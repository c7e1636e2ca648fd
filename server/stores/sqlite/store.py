"""The store in one SQLite file on the server's disk.

One thread writes. It takes everything that waits, writes it in one transaction and syncs once (group commit). So many
callers share the cost of an fsync, and each gets its answer only after the bytes are on disk: WAL, synchronous=FULL.
"""

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from histospec.server.arguments import shown
from histospec.server.errors import StoreError, StoreFull
from histospec.server.stores.group_commit import GROUP_BYTES, MAX_BACKLOG, GroupCommit, Work
from histospec.server.stores.interface import HISTORY_RESPONSES, Problem, ResponseBatch, Store, StoreSize
from histospec.server.stores.sqlite.damage import lost_before, note_loss, replace, resume
from histospec.server.stores.sqlite.database import (
    DAMAGE,
    Readers,
    connect,
    connect_to_read,
    damaged_log,
    free_bytes,
    is_damage,
    open_store_file,
    recover,
)
from histospec.server.stores.sqlite.file import FILE_NAME, Files, Lock, besides, volume_space, written_bytes
from histospec.server.stores.sqlite.reader import SQLiteReader
from histospec.server.stores.sqlite.retention import Retention
from histospec.server.stores.sqlite.structure import StructureCheck, structural_damage
from histospec.server.stores.sqlite.writes import Again, Appender, Slice, Write, depart, departures, work_off

log = structlog.get_logger()

READERS = 8  # concurrent reading connections
# A file up to this size in bytes is checked before any write: this takes a moment, even on a slow disk.
SMALL = 64 << 20
MAX_REPAIRS = 3  # per process: more of them point to a faulty disk, not a damaged file


class Cut(sqlite3.DatabaseError):
    """A file of the open store has lost bytes that the server wrote."""


class SQLiteStore(SQLiteReader, Store):
    """Stores responses in `DIR/histospec.sqlite`; locks `DIR` against a second server.

    The file grows to `disk` bytes at most. Deletes a problem `retention` seconds after its last write; never if that
    is 0. Renames a damaged file and replaces it with one of its readable contents. Raises ConfigError if the directory
    or its file cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        history_epochs: int,
        *,
        history_responses: int = HISTORY_RESPONSES,
        retention: float = 0.0,
        disk: int | None = None,
        max_backlog: int = MAX_BACKLOG,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._connection: sqlite3.Connection
        self._files: Files
        self._reported = False  # whether `trouble` has seen that a file was cut
        self._lock = Lock(directory)
        path = directory / FILE_NAME
        try:
            resume(path)
            if not path.exists() and besides(path)[1].exists():
                log.error("the store is gone; its write-ahead log is left", file=str(path))
                note_loss(path)
            elif lost := damaged_log(path):
                replace(path, disk, lost, cut=True)
            try:
                connection = open_store_file(path, disk)
            except DAMAGE as error:
                replace(path, disk, str(error))
                connection = open_store_file(path, disk)
            super().__init__(Readers(), path, history_responses, history_epochs)
            self._open()
            connection.close()
        except BaseException:
            self._lock.release()
            raise
        self._damage.lost(lost_before(path))  # also in earlier runs, or a restart would hide it
        self._repairs = 0
        self._trouble = ""
        self._closed = False
        self._small = path.stat().st_size <= SMALL
        self._slice = Slice()
        self._appender = Appender(history_epochs, history_responses, self._slice)
        self._version = 0  # SQLite's data_version, which changes when other connections write
        self._writer: GroupCommit[Write] = GroupCommit(self._commit, self._disconnect, max_backlog)
        self._checked = self.submit(self._begin)  # before any write
        self._structure = StructureCheck(path)
        self._retention: Retention | None = None
        if retention:
            self._retention = Retention(retention, self.submit, lambda: connect_to_read(path), self._slice, wall)
            self._retention.start()

    @property
    def waiting_bytes(self) -> int:
        """See Store."""
        return self._writer.backlog

    @property
    def waiting_limit(self) -> int:
        """See Store."""
        return self._writer.max_backlog

    @property
    def size(self) -> StoreSize:
        """See Store."""
        volume = volume_space(self._path.parent)
        written = written_bytes(self._path)
        held = None if written is None else max(0, written - self._free_bytes)
        return StoreSize(held, self._disk, *(volume or (None, None)))

    @property
    def retention_paused(self) -> str:
        """See Store."""
        return self._retention.paused if self._retention else ""

    def submit(self, write: Write, size: int = 0) -> "Future[Any]":
        """Queues a write of about `size` bytes, which shares a transaction with others that wait."""
        return self._writer.submit(write, size)

    def append(self, batch: ResponseBatch) -> "Future[int]":
        """See Store."""
        return self.submit(partial(self._appender.append, batch=batch), batch.waiting_size)

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""
        return self.submit(partial(depart, self._slice, namespace, None))

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""
        return self.submit(partial(depart, self._slice, namespace, epoch))

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO namespaces (namespace, newest_epoch) VALUES (?, 0)", (namespace,))
            connection.execute("REPLACE INTO estimators (namespace, state) VALUES (?, ?)", (namespace, state))

        return self.submit(run, len(state))

    def _commit(self, group: list[Work[Write]]) -> None:
        """Writes a group in one transaction; if that fails, each work alone, so that one cannot spoil the others."""
        try:
            results = self._transact(group)
        except Exception as error:
            self._appender.forget()
            if is_damage(error) and self._repaired(error):
                self._commit(group)
                return
            if not self.trouble:
                self._connection = recover(self._connection, self._path, self._disk)
            if len(group) > 1:
                for work in group:
                    self._commit([work])
            else:
                self._writer.fail(group[0], self._explain(error))
            return
        for work, result in zip(group, results, strict=True):
            if isinstance(result, Again):
                self._writer.again(work, result.rest)
            else:
                self._writer.settle(work, result)

    def _transact(self, group: list[Work[Write]]) -> list[Any]:
        self._require_files()
        self._require_sizes()
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._version:  # another program has written, such as `histospec forget`
            self._version = version
            self._appender.forget()
        self._slice.begin()
        results = [work.what(connection) for work in group]
        connection.execute("COMMIT")
        self._free_bytes = free_bytes(connection)
        self._require_files()  # never acknowledge writes to a deleted file
        self._require_sizes()
        return results

    def _require_sizes(self) -> None:
        if cut := self._files.cut():
            raise Cut(f"malformed: {cut} while the server has it open")

    def _require_files(self) -> None:
        if trouble := self.trouble:
            raise StoreError(f"{trouble}; the request is refused")

    @property
    def trouble(self) -> str:
        """See Store. Logs when it changes."""
        changed = self._files.changed()
        if self._closed:  # SQLite has deleted the write-ahead log
            return ""
        trouble = f"store: {changed}; bring it back or restart the server, which drafts on meanwhile" if changed else ""
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.error("nothing can be stored", reason=trouble)
            else:
                log.info("the store's files are back")
        if not (trouble or self._reported) and self._files.cut():
            self._reported = True
            self.submit(lambda _: None)  # the writer replaces the file
        return trouble

    def _explain(self, error: Exception) -> StoreError:
        text = str(error)
        if isinstance(error, StoreError):
            return error
        if "full" not in text:
            return StoreError(f"store: {text}; the request is refused")
        # SQLite reports both cases with the same error.
        if self._disk and shutil.disk_usage(self._path.parent).free > 2 * GROUP_BYTES:
            return StoreFull(
                f"store: the file has reached its limit (--disk {shown(self._disk)}); the request is refused"
            )
        return StoreFull(f"store: the disk is full ({text}); free some space; the request is refused")

    # Damage

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Checks the structure of a small file, to find damage before anything is written to it."""
        if self._small and (found := structural_damage(connection)):
            raise sqlite3.DatabaseError(found)
        for departure in departures(connection):  # that a crash left unfinished
            self.submit(partial(work_off, self._slice, departure))

    def wanted_first(self) -> Iterator[list[Problem]]:
        """See Store. Starts once the structure of a small file has been checked."""
        with suppress(StoreError):
            self._checked.result()
        yield from super().wanted_first()

    def look_for_damage(self) -> None:
        """See Store. Checks the structure of a large file; that of a small one was checked at the start."""
        generation = self._readers.generation
        if not self._small:
            self._structure.start(lambda reason: self._repair(generation, sqlite3.DatabaseError(reason)))

    def _repair(self, generation: int, error: Exception) -> bool:
        """See SQLiteReader. Runs in the writer's thread: new writes wait, and go to the new file."""

        def repaired(connection: sqlite3.Connection) -> bool:
            if generation == self._readers.generation:
                raise error  # as if the write had met it
            return True

        with suppress(StoreError):
            return bool(self.submit(repaired).result())
        return False

    def _repaired(self, reason: Exception) -> bool:
        """Replaces the damaged file. Returns whether that succeeded."""
        self._repairs += 1
        if self._repairs > MAX_REPAIRS or self.trouble:
            return False
        with self._readers.away():
            # A reading connection closes last: it does not move the write-ahead log into the file.
            self._connection.close()
            self._readers.end()
            self._files.close()
            try:
                self._damage.lost(replace(self._path, self._disk, str(reason), isinstance(reason, Cut)).lost)
                done = True
            except StoreError as failed:
                log.error("the damaged store stays in use", reason=str(failed))
                done = False
            self._open()
        return done

    def _open(self) -> None:
        """Connects, and records which files these are."""
        self._connection = connect(self._path, self._disk)  # the writer's
        self._free_bytes = free_bytes(self._connection)
        for _ in range(READERS):
            reader = connect_to_read(self._path)
            with suppress(*DAMAGE):
                reader.execute("SELECT count(*) FROM sqlite_master").fetchone()  # creates the files of the log
            self._readers.add(reader)
        self._files = Files(self._path)
        self._reported = False

    def _disconnect(self) -> None:
        """Moves the write-ahead log into the file, after the last write."""
        self._closed = True
        self._connection.close()

    def close(self) -> None:
        """See Store."""
        if self._retention:
            self._retention.close()
        self._structure.close()
        super().close()  # before the writer, see `_disconnect`
        self._writer.close()
        self._files.close()
        self._lock.release()
