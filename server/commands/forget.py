"""`histospec forget --older-than DAYS`: deletes old problems and resumes a paused retention."""

import math
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from histospec.server.arguments import ArgumentParser
from histospec.server.errors import ConfigError, StoreError
from histospec.server.open_store import DAY
from histospec.server.settings import options
from histospec.server.settings.config import StoreConfig
from histospec.server.stores.sqlite.database import open_existing
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.retention import Trust, each_old, note_down
from histospec.server.stores.sqlite.writes import SLICE_SECONDS, Again, Slice, Write, forget_old


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Raises HistoSpecError."""
    parser: ArgumentParser = options.parser(
        StoreConfig,
        "histospec forget",
        "Delete problems that received no response for this many days; works while a server runs.",
    )
    parser.add_argument("--older-than", metavar="DAYS", required=True, help="days, such as 30, 30d or 0.5d")
    parser.add_argument("--dry-run", action="store_true", help="print how many there are, and change nothing")
    flags = vars(parser.parse_args(list(argv)))
    days, dry_run = _days(flags.pop("older_than")), flags.pop("dry_run", False)
    config = options.settle(StoreConfig, flags)
    if config.kind != "sqlite":
        raise ConfigError("--store: works only with sqlite; Redis deletes problems when their keys expire")
    now = time.time()
    try:
        with closing(open_existing(config.data_dir / FILE_NAME, write=not dry_run)) as connection:
            if dry_run:
                forgotten = sum(1 for _ in each_old(now - days * DAY, connection))
            else:
                slice_ = Slice()
                forgotten = _run(connection, slice_, partial(forget_old, slice_, now - days * DAY))
                _run(connection, slice_, partial(note_down, Trust(now, -math.inf), ""))
    except sqlite3.Error as error:
        raise StoreError(f"store: {config.data_dir / FILE_NAME}: {error}") from error
    what = "would be forgotten" if dry_run else "forgotten; a paused retention continues"
    sys.stdout.write(f"{forgotten} prompts {what}\n")
    return 0


def _run(connection: sqlite3.Connection, slice_: Slice, write: Write) -> int:
    """Runs a write to its end, and lets the server write in between."""
    while True:
        connection.execute("BEGIN IMMEDIATE")
        slice_.begin()
        result = write(connection)
        connection.execute("COMMIT")
        if not isinstance(result, Again):
            return int(result or 0)
        write = result.rest
        time.sleep(SLICE_SECONDS)


def _days(text: str) -> float:
    try:
        days = float(text.removesuffix("d"))
    except ValueError:
        days = math.nan
    if not 0 <= days <= 36500:
        raise ConfigError(f"--older-than: {text!r} is not a number of days from 0 to 36500, such as 30 or 0.5")
    return days
