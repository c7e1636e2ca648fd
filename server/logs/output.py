"""The log of a running server: one thread writes queued lines, and stray output on stderr becomes lines, too."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

import structlog

from histospec.server.logs import lines as logs
from histospec.server.logs.stray import StrayLines
from histospec.server.logs.writer import LogWriter

log = structlog.get_logger()

FLUSH_SECONDS = 1.0
CLOSED = -1

_writers: list[LogWriter] = []


def dropped() -> int:
    """Returns how many lines of this process could not be written."""
    return sum(writer.dropped for writer in _writers)


def drain(seconds: float = FLUSH_SECONDS) -> bool:
    """Waits up to `seconds` until all queued lines are written. Returns whether they are."""
    return all(writer.drain(seconds) for writer in _writers)


@contextmanager
def log_output(form: str, level: str) -> Iterator[None]:
    """Sends the log to stderr, and turns everything else that is written to stderr into log lines.

    Restores stderr at the end; if stderr cannot be written, it stays detached, so that nothing waits for it.
    """
    opened = sys.stderr is not None
    stderr = os.dup(2) if opened else CLOSED
    if not opened:
        _occupy_2()
    writer = LogWriter(stderr, _tell)
    _writers.append(writer)
    logs.configure(form, level, cast(TextIO, writer))
    stray = StrayLines(stderr) if opened else None  # if stderr was closed, descriptor 2 may be any file
    try:
        yield
    finally:
        if drain() and stray is not None:
            stray.close(FLUSH_SECONDS)
            drain()


def _occupy_2() -> None:
    """Occupies the number of a closed stderr, so that output of C code does not end up in a file."""
    try:
        os.fstat(2)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != 2:
            os.dup2(null, 2)
            os.close(null)


def _tell(lines: int) -> None:
    log.warning("log lines were dropped", lines=lines)
