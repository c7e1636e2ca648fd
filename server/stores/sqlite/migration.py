"""Opens the file of the SQLite store, and migrates one of an older version.

    histospec.sqlite.v5            a copy for servers of version 5, made before a change that they could not read
    histospec.sqlite.v5.partial    an unfinished copy; after a crash, the next attempt starts again

Long work is done in slices before the transaction that changes the version. So a crash in the middle leaves a file of
the older version, and the next start continues where it stopped.
"""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import structlog

from histospec.server.security import private
from histospec.server.stores.opening import Progress
from histospec.server.stores.sqlite.copies import keep_copy
from histospec.server.stores.sqlite.file import besides, connect, connect_to_read, usable, version_of
from histospec.server.stores.sqlite.schema import APPLICATION_ID, COMPATIBILITY, FILLING, VERSIONS, Filling, Version

log = structlog.get_logger()

SLICE_SECONDS = 0.1  # target duration of one transaction of a filling
FIRST_SLICE = 64  # prompts
BUSY_MILLISECONDS = 500  # that a transaction waits for another program's lock before it checks whether to continue
SAID_EVERY = 5.0  # seconds between two log lines about one filling


def open_file(
    path: Path,
    disk: int | None = None,
    *,
    copy: bool = True,
    progress: Progress | None = None,
    versions: Sequence[Version] = VERSIONS,
) -> sqlite3.Connection:
    """Connects to the file, creates it if it does not exist, and migrates its schema.

    Args:
        path: the file.
        disk: maximum bytes of the file; None for no limit.
        copy: keep a copy before a change that servers of the file's version could not read.
        progress: receives how far it is.
        versions: all versions that this server knows.

    Raises ConfigError if the file cannot be used, and GivenUp as `progress` does.
    """
    progress = progress or Progress()
    with usable(path):
        private.create(path)
        private.tighten(besides(path))
        with closing(connect_to_read(path)) as reader:  # closing a writer would move the write-ahead log
            version = version_of(reader, path, len(versions))
        if version == 0:
            with closing(connect(path)) as connection:
                _make(connection, versions, progress)
        elif version < len(versions):
            if copy and versions[-1].readable_from > version:
                keep_copy(path, version, len(versions), progress)
            with closing(connect(path)) as connection:
                _update(connection, path, version, versions, progress)
        return connect(path, disk)


def _make(connection: sqlite3.Connection, versions: Sequence[Version], progress: Progress) -> None:
    """Applies all versions in one transaction: a crash leaves an empty file."""
    changes = "".join(_change(number, version) for number, version in enumerate(versions, 1))
    _transact(connection, f"PRAGMA application_id = {APPLICATION_ID}; {changes}", "making the file", progress)


def _update(
    connection: sqlite3.Connection, path: Path, held: int, versions: Sequence[Version], progress: Progress
) -> None:
    """Applies one version after the other."""
    started = time.monotonic()
    log.info("bringing the store up to date", file=str(path), schema=held, to=len(versions))
    for number, version in enumerate(versions[held:], held + 1):
        text = f"migrating to schema {number} of {len(versions)}"
        progress.tell(text)
        if version.filling:
            _fill(connection, version.filling, text, progress)
        _transact(connection, _change(number, version), text, progress)
    log.info("the store is up to date", schema=len(versions), seconds=round(time.monotonic() - started, 3))


def _change(number: int, version: Version) -> str:
    """Returns the statements that turn a file of the previous version into one of this version."""
    return f"""
        {FILLING}
        INSERT OR IGNORE INTO filling VALUES (1, 0, 0);
        {version.filling.tables if version.filling else ""}
        {version.script}
        DROP TABLE filling;
        {COMPATIBILITY}
        DELETE FROM compatibility;
        INSERT INTO compatibility (version, readable_from) VALUES ({number}, {version.readable_from});
        PRAGMA user_version = {number};
    """


def _fill(connection: sqlite3.Connection, filling: Filling, text: str, progress: Progress) -> None:
    """Derives rows for all existing prompts, in slices."""
    begin = "INSERT OR IGNORE INTO filling SELECT 1, 0, (SELECT coalesce(max(id), 0) FROM responses);"
    _transact(connection, f"{FILLING} {filling.tables} {begin}", text, progress)
    ((above,),) = connection.execute("SELECT prompt FROM filling").fetchall()
    ((last,),) = connection.execute("SELECT coalesce(max(id), 0) FROM prompts").fetchall()
    size, said = FIRST_SLICE, time.monotonic()
    while above < last:
        began = time.monotonic()
        done = f"{100 * above // last} %"
        progress.tell(f"{text}, {done}")
        if began - said > SAID_EVERY:
            said = began
            log.info(text, done=done)
        end = "SELECT id FROM prompts WHERE id > ? ORDER BY id LIMIT 1 OFFSET ?"
        upto = (connection.execute(end, (above, size - 1)).fetchone() or (last,))[0]
        steps = "".join(step.format(above=above, upto=upto) for step in filling.steps)
        _transact(connection, f"{steps} UPDATE filling SET prompt = {upto};", text, progress)
        above = upto
        size = 2 * size if time.monotonic() - began < SLICE_SECONDS / 2 else max(1, size // 2)


def _transact(connection: sqlite3.Connection, script: str, text: str, progress: Progress) -> None:
    """Runs a script in one transaction, once no other program locks the file."""
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    while True:
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {script} COMMIT;")
        except sqlite3.OperationalError as error:  # noqa: PERF203 - another program will release the lock
            if connection.in_transaction or "locked" not in str(error):
                raise
            progress.tell(f"{text}; another program has the file locked")
        else:
            return
