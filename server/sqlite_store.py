"""The store in one SQLite file beside the server.

One thread writes. It takes everything that waits, writes it in one transaction and syncs once (group commit), so many
callers share the price of an fsync and each is told only after the bytes are on the disk: WAL with synchronous=FULL.
"""

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog

from histospec.server.arguments import shown
from histospec.server.errors import StoreError, StoreFull
from histospec.server.group_commit import GROUP_BYTES, MAX_BACKLOG, GroupCommit, Work
from histospec.server.sqlite_file import FILE_NAME, connect, lock, open_file, recover
from histospec.server.sqlite_reader import SQLiteReader, digest_of, prompts_of
from histospec.server.store import Batch, Record, Store, total_size

FORGET_SECONDS = 3600.0  # between looks for what is old, or a tenth of the retention
FORGET_AT_ONCE = 500  # prompts, in one transaction

log = structlog.get_logger()
_Write = Callable[[sqlite3.Connection], Any]


class SQLiteStore(SQLiteReader, Store):
    """Responses in `DIR/histospec.sqlite`; `DIR` is locked against a second server.

    The file grows to `disk` bytes at most. A problem that nobody wrote to for `retention` seconds is forgotten, never
    where that is 0. Raises ConfigError where the directory or the file in it cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        history_epochs: int,
        *,
        retention: float = 0.0,
        disk: int | None = None,
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        self._history_epochs = history_epochs
        self._retention = retention
        self._disk = disk
        self._lock = lock(directory)
        path = directory / FILE_NAME
        try:
            super().__init__(open_file(path), path)
        except BaseException:
            os.close(self._lock)
            raise
        self._connection = connect(path, disk)  # of the writer
        self._writer: GroupCommit[_Write] = GroupCommit(self._commit, lambda: self._connection.close(), max_backlog)
        self._closing = threading.Event()
        self._forgetting = threading.Thread(target=self._forget_now_and_then, name="retention", daemon=True)
        if retention:
            self._forget_old()
            self._forgetting.start()

    @property
    def waiting_bytes(self) -> int:
        """See Store."""
        return self._writer.backlog

    def append(self, batch: Batch) -> "Future[None]":
        """See Store."""
        size = total_size(batch.records) + len(batch.problem.prompt)
        return self._writer.submit(lambda connection: self._append(connection, batch), size)

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> int:
            dropped = connection.execute(
                "DELETE FROM responses WHERE prompt IN (SELECT id FROM prompts WHERE namespace = ?)", (namespace,)
            ).rowcount
            connection.execute("DELETE FROM prompts WHERE namespace = ?", (namespace,))
            connection.execute("DELETE FROM estimators WHERE namespace = ?", (namespace,))
            connection.execute("DELETE FROM namespaces WHERE namespace = ?", (namespace,))
            return dropped

        return self._writer.submit(run, 0)

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> int:
            connection.execute(
                "UPDATE namespaces SET newest_epoch = min(newest_epoch, ?) WHERE namespace = ?", (epoch, namespace)
            )
            return connection.execute(
                "DELETE FROM responses WHERE epoch > ? AND prompt IN (SELECT id FROM prompts WHERE namespace = ?)",
                (epoch, namespace),
            ).rowcount

        return self._writer.submit(run, 0)

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store."""

        def run(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR IGNORE INTO namespaces VALUES (?, 0)", (namespace,))
            connection.execute("REPLACE INTO estimators (namespace, state) VALUES (?, ?)", (namespace, state))

        return self._writer.submit(run, len(state))

    def _commit(self, group: list[Work[_Write]]) -> None:
        """Writes a group in one transaction; when it fails, each alone, so that one cannot spoil the others'."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            results = [work.what(self._connection) for work in group]
            self._connection.execute("COMMIT")
        except Exception as error:
            self._connection = recover(self._connection, self._path, self._disk)
            if len(group) > 1:
                for work in group:
                    self._commit([work])
            else:
                self._writer.fail(group[0], self._explain(error))
            return
        for work, result in zip(group, results, strict=True):
            self._writer.settle(work, result)

    def _append(self, connection: sqlite3.Connection, batch: Batch) -> None:
        records = self._slide(connection, batch)
        if not records:
            return
        problem = batch.problem
        key = (problem.namespace, problem.name, digest_of(problem.prompt), problem.prompt)
        row = connection.execute(
            "SELECT id FROM prompts WHERE namespace = ? AND problem = ? AND digest = ? AND tokens = ?", key
        ).fetchone()
        prompt = (
            row[0]
            if row
            else connection.execute(
                "INSERT INTO prompts (namespace, problem, digest, tokens) VALUES (?, ?, ?, ?)", key
            ).lastrowid
        )
        connection.execute("REPLACE INTO writes VALUES (?, ?)", (prompt, time.time()))
        connection.executemany(
            "INSERT INTO responses (prompt, epoch, reward, tokens, logprobs, generated, seed) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(prompt, r.epoch, r.reward, r.tokens, r.logprobs, r.generated, r.seed) for r in records],
        )
        connection.execute(
            "INSERT INTO namespaces VALUES (?, ?) ON CONFLICT (namespace) DO UPDATE "
            "SET newest_epoch = excluded.newest_epoch WHERE excluded.newest_epoch > newest_epoch",
            (problem.namespace, max(record.epoch for record in records)),
        )

    def _slide(self, connection: sqlite3.Connection, batch: Batch) -> list[Record]:
        """Makes room in the window of the problem. -> those of the batch that are inside of it.

        What leaves goes first: where the file may not grow, the new takes its place.
        """
        among, key = prompts_of(batch.problem)
        held = {
            e for (e,) in connection.execute(f"SELECT DISTINCT epoch FROM responses WHERE prompt IN ({among})", key)
        }
        kept = sorted(held | {record.epoch for record in batch.records})[-self._history_epochs :]
        if held and min(held) < kept[0]:
            connection.execute(f"DELETE FROM responses WHERE prompt IN ({among}) AND epoch < ?", (*key, kept[0]))
            if batch.problem.name:  # which may come with a new prompt every time
                connection.execute(
                    f"DELETE FROM prompts WHERE id IN ({among}) "
                    "AND NOT EXISTS (SELECT 1 FROM responses WHERE prompt = prompts.id)",
                    key,
                )
        return [record for record in batch.records if record.epoch >= kept[0]]

    def _forget_now_and_then(self) -> None:
        while not self._closing.wait(min(self._retention / 10, FORGET_SECONDS)):
            self._forget_old()

    def _forget_old(self) -> None:
        """Forgets what retention says, a little at a time, so that nobody waits long."""
        try:
            while self._writer.submit(self._forget_some, 0).result():
                pass
        except StoreError as error:  # the next time comes
            log.warning("old problems are not forgotten", reason=str(error))

    def _forget_some(self, connection: sqlite3.Connection) -> int:
        """-> how many prompts that were. Those of a named problem stay until none of them is written to."""
        since = time.time() - self._retention
        return connection.execute(
            "DELETE FROM prompts WHERE id IN (SELECT id FROM writes JOIN prompts AS mine ON id = prompt "
            "WHERE latest < ? AND (problem = '' OR NOT EXISTS (SELECT 1 FROM prompts AS others "
            "JOIN writes ON prompt = others.id WHERE others.namespace = mine.namespace "
            "AND others.problem = mine.problem AND latest >= ?)) LIMIT ?)",
            (since, since, FORGET_AT_ONCE),
        ).rowcount

    def _explain(self, error: Exception) -> StoreError:
        text = str(error)
        if "full" not in text:
            return StoreError(f"store: {text}; nothing of this request was kept")
        # SQLite says the same of both.
        if self._disk and shutil.disk_usage(self._path.parent).free > 2 * GROUP_BYTES:
            return StoreFull(
                f"store: the file has reached its limit (--disk {shown(self._disk)}); nothing of this request was kept"
            )
        return StoreFull(f"store: the disk is full ({text}); free some room, nothing of this request was kept")

    def close(self) -> None:
        """See Store."""
        self._closing.set()
        if self._retention:
            self._forgetting.join()
        self._writer.close()
        super().close()
        os.close(self._lock)
