"""The log of a running server: lines that wait in a queue for one thread to write them, and stray lines among them."""

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
    """How many lines of this process could not be written."""
    return sum(writer.dropped for writer in _writers)


def drain(seconds: float = FLUSH_SECONDS) -> bool:
    """Waits so long for what waits to be written; whether all of it was."""
    return all(writer.drain(seconds) for writer in _writers)


@contextmanager
def log_output(form: str, level: str) -> Iterator[None]:
    """The log goes to stderr, and so does everything that is written to stderr, as lines of the log.

    At the end stderr is as before; where it cannot be written, it stays apart, so that nothing waits for it.
    """
    opened = sys.stderr is not None
    stderr = os.dup(2) if opened else CLOSED
    if not opened:
        _occupy_2()
    writer = LogWriter(stderr, _tell)
    _writers.append(writer)
    logs.configure(form, level, cast(TextIO, writer))
    stray = StrayLines(stderr) if opened else None  # where it was closed, 2 may be any file
    try:
        yield
    finally:
        if drain() and stray is not None:
            stray.close(FLUSH_SECONDS)
            drain()


def _occupy_2() -> None:
    """Keeps what C code says out of the file that would get the number of a closed stderr."""
    try:
        os.fstat(2)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != 2:
            os.dup2(null, 2)
            os.close(null)


def _tell(lines: int) -> None:
    log.warning("log lines were dropped", lines=lines)
