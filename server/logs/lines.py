"""Structured logs on stderr: formatted text on a terminal, otherwise one JSON object per line."""

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
"""The last warnings of this process."""

REQUEST_ID = "x-request-id"  # a key of call metadata
LONGEST_REQUEST_ID = 64
_STRANGE = re.compile(r"[^A-Za-z0-9._:/=+-]")


def request_id(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the ID of a call for the log: up to 64 safe characters that the caller sent, or random ones."""
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
    """Lets some lines of a kind through, then omits further ones for a while, and then reports how many it omitted.

    For lines that an unauthenticated peer can cause: they must neither fill the disk nor hide other lines.
    """

    def __init__(self, lines: int = 20, seconds: float = 10.0) -> None:
        self._lines = lines
        self._seconds = seconds
        self._windows: dict[Hashable, tuple[float, int]] = {}  # by kind: start of the window, lines in it

    def admits(self, kind: Hashable, now: float | None = None) -> dict[str, int] | None:
        """Returns None to omit the line, otherwise fields to add: `left_out` after omitted lines. Kinds must be few."""
        now = time.monotonic() if now is None else now
        began, lines = self._windows.get(kind, (-math.inf, 0))
        if now - began >= self._seconds:
            self._windows[kind] = (now, 1)
            return {"left_out": lines - self._lines} if lines > self._lines else {}
        self._windows[kind] = (began, lines + 1)
        return {} if lines < self._lines else None
