"""Copies of the SQLite file that are kept for servers of an older version, so that an upgrade can be taken back."""

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

PAGES = 2048  # copied between two looks whether to go on: 8 MiB of 4 KiB each
SPARE = 16 << 20  # bytes that stay free beside a copy, for the migration itself


def copy_of(path: Path, version: int) -> Path:
    """Where the copy for servers of a version is kept."""
    return path.with_name(f"{path.name}.v{version}")


def keep_copy(path: Path, version: int, to: int, progress: Progress) -> None:
    """Copies a file of this version, which is about to become one of version `to`. It replaces copies made before.

    Raises ConfigError where the volume has no room for it, and GivenUp as `progress` does.
    """
    started = time.monotonic()
    copy = copy_of(path, version)
    partial = copy.with_name(f"{copy.name}.partial")
    for old in [*path.parent.glob(f"{path.name}.v*.partial"), *copies_of(path).values()]:
        if old != copy:  # that one stays until the new one is complete
            old.unlink()
    with closing(connect_to_read(path)) as source:
        _require_room(source, path, version, to)
        private.create(partial)
        with closing(sqlite3.connect(partial, isolation_level=None)) as target:
            target.execute("PRAGMA journal_mode = OFF")
            target.execute("PRAGMA synchronous = OFF")  # it is synced as a whole

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
            f"--data-dir: {path} has schema {version} and is to get schema {to}, which older servers cannot read; a "
            f"copy for them needs {need >> 20} MiB, but {free >> 20} MiB are free: make room, or give "
            "--no-upgrade-copy and give up the way back"
        )


def say_kept(path: Path) -> None:
    """Logs which copies take room."""
    for version, copy in sorted(copies_of(path).items()):
        log.info(
            "a copy from before an upgrade is kept; delete it once no older server will be needed",
            file=str(copy),
            schema=version,
            bytes=copy.stat().st_size,
        )
