"""Copies of the SQLite file for servers of an older version, so that an upgrade can be undone."""

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import structlog

from histospec.server.errors import ConfigError
from histospec.server.security import private
from histospec.server.stores.opening import Progress
from histospec.server.stores.sqlite.file import connect_to_read, copies_of

log = structlog.get_logger()

PAGES = 2048  # pages copied between two checks whether to continue: 8 MiB at 4 KiB each
SPARE = 16 << 20  # bytes that must stay free besides a copy, for the migration itself


def copy_of(path: Path, version: int) -> Path:
    """Returns the path of the copy for servers of a version."""
    return path.with_name(f"{path.name}.v{version}")


def keep_copy(path: Path, version: int, to: int, progress: Progress) -> None:
    """Copies a file of this version before it becomes one of version `to`. Replaces earlier copies.

    Raises ConfigError if the volume has too little space, and GivenUp as `progress` does.
    """
    started = time.monotonic()
    copy = copy_of(path, version)
    partial = copy.with_name(f"{copy.name}.partial")
    for old in [*path.parent.glob(f"{path.name}.v*.partial"), *copies_of(path).values()]:
        if old != copy:  # the old copy of this version stays until the new one is complete
            old.unlink()
    with closing(connect_to_read(path)) as source:
        _require_room(source, path, version, to)
        private.create(partial)
        with closing(sqlite3.connect(partial, isolation_level=None)) as target:
            target.execute("PRAGMA journal_mode = OFF")
            target.execute("PRAGMA synchronous = OFF")  # the whole file is synced at the end

            def copied(_: int, remaining: int, total: int) -> None:
                done = 100 * (total - remaining) // max(1, total)
                progress.tell(f"keeping a copy for servers of schema {version}, {done} %")

            source.backup(target, pages=PAGES, progress=copied, sleep=0)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(copy)
    private.sync_folder(path.absolute().parent)
    log.info(
        "a copy of the store is kept for older servers",
        file=str(copy),
        schema=version,
        bytes=copy.stat().st_size,
        seconds=round(time.monotonic() - started, 3),
    )


def _require_room(source: sqlite3.Connection, path: Path, version: int, to: int) -> None:
    ((pages,),) = source.execute("PRAGMA page_count").fetchall()
    ((page,),) = source.execute("PRAGMA page_size").fetchall()
    need = pages * page + SPARE
    free = shutil.disk_usage(path.absolute().parent).free
    if need > free:
        raise ConfigError(
            f"--data-dir: {path} has schema {version} and needs schema {to}, which older servers cannot read; a copy "
            f"for them needs {need >> 20} MiB, but only {free >> 20} MiB are free: free some space, or give "
            "--no-upgrade-copy, after which a rollback is impossible"
        )


def say_kept(path: Path) -> None:
    """Logs the copies that take space."""
    for version, copy in sorted(copies_of(path).items()):
        log.info(
            "a copy from before an upgrade is kept; delete it once no older server will be needed",
            file=str(copy),
            schema=version,
            bytes=copy.stat().st_size,
        )
