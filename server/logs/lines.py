"""Structured logs on stderr: pretty on a terminal, one JSON object a line otherwise."""

import logging
import math
import re
import secrets
import sys
import time
from collections.abc import Hashable, Iterable
from typing import TextIO

import structlog
from structlog.typing import Processor

from histospec.server.logs.recent import RecentLines
from histospec.server.logs.visible import visible, visible_traceback

RECENT = RecentLines()
"""What this process last warned of."""

REQUEST_ID = "x-request-id"  # metadata of a call
LONGEST_REQUEST_ID = 64
_STRANGE = re.compile(r"[^A-Za-z0-9._:/=+-]")


def request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """What a call is named in the log: as its caller says, in at most 64 harmless characters, else at random."""
    given = next((value for name, value in metadata if name == REQUEST_ID and isinstance(value, str)), "")
    return _STRANGE.sub("", given[:LONGEST_REQUEST_ID]) or secrets.token_hex(6)


def configure(form: str, level: str, file: TextIO | None = None) -> None:
    """Sets up structlog for the process; `form` is auto, pretty or json. Call once, from a command.

    Lines go to `file`, by default stderr.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    pretty = terminal if form == "auto" else form == "pretty"
    render: list[Processor] = (
        [visible, structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=visible_traceback)]
        if pretty
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not pretty),
            RECENT,
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
        if hasattr(logging, "getLevelNamesMapping")
        else structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=file or sys.stderr),
        cache_logger_on_first_use=True,
    )


class Throttle:
    """Lets some lines of a kind through, then none for a while, and then says how many were left out.

    For lines that a stranger can cause: they must not fill the disk, or hide what else is there.
    """

    def __init__(self, lines: int = 20, seconds: float = 10.0) -> None:
        self._lines = lines
        self._seconds = seconds
        self._windows: dict[Hashable, tuple[float, int]] = {}  # by kind: when it began, lines since

    def admits(self, kind: Hashable, now: float | None = None) -> dict[str, int] | None:
        """None: leave the line out. Otherwise what to add to it: `left_out`, where lines were. Kinds must be few."""
        now = time.monotonic() if now is None else now
        began, lines = self._windows.get(kind, (-math.inf, 0))
        if now - began >= self._seconds:
            self._windows[kind] = (now, 1)
            return {"left_out": lines - self._lines} if lines > self._lines else {}
        self._windows[kind] = (began, lines + 1)
        return {} if lines < self._lines else None
