"""Structured log lines: formatted text on a terminal, otherwise one JSON object per line. Keeps the last warnings."""

import logging
import math
import re
import secrets
import sys
import time
import traceback
from collections import deque
from collections.abc import Hashable, Iterable
from threading import Lock
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from histospec.protocol.redaction import without_secrets

REQUEST_ID = "x-request-id"  # a key of call metadata
LONGEST_REQUEST_ID = 64
_STRANGE = re.compile(r"[^A-Za-z0-9._:/=+-]")
LINES = 50  # recent warnings and errors that are kept
LONGEST = 300  # characters of one value of these
EACH = 20  # of these with the same event, so that one kind of trouble does not hide others
KEPT = ("warning", "error", "critical")
INDENT = "    "  # of tracebacks
# Local variables hold tokens, passwords and prompts.
TRACEBACKS = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))


class RecentLines:
    """A structlog processor that keeps the last lines of these levels and passes all lines on unchanged.

    Of lines with the same event it keeps at most `EACH`.
    """

    def __init__(self) -> None:
        self._lines: deque[dict[str, str]] = deque(maxlen=LINES)
        self._lock = Lock()

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        """Keeps the line. See structlog."""
        if line.get("level") in KEPT:
            kept = _kept(line)
            with self._lock:
                alike = [one for one in self._lines if one["event"] == kept["event"]]
                if len(alike) >= EACH:
                    self._lines.remove(alike[0])
                self._lines.append(kept)
        return line

    def newest_first(self) -> list[dict[str, str]]:
        """Returns `time`, `level`, `event` and `details` of each line. Of an exception it keeps only the type."""
        return list(reversed(self._lines))


def _kept(line: EventDict) -> dict[str, str]:
    details = {k: v for k, v in line.items() if k not in ("timestamp", "level", "event", "exc_info")}
    error = line.get("exc_info")
    if error:
        raised = error if isinstance(error, BaseException) else sys.exc_info()[1]
        details["error"] = type(raised).__name__
    return {
        "time": str(line.get("timestamp", "")),
        "level": str(line["level"]),
        "event": _cut(str(line.get("event", ""))),
        "details": ", ".join(f"{name}: {_cut(str(value))}" for name, value in details.items()),
    }


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _redact(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """Removes secrets from all texts of a line, whichever code wrote them. See structlog."""
    for name, value in line.items():
        line[name] = _clean(value)
    return line


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {name: _clean(one) for name, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value


RECENT = RecentLines()
"""The last warnings of this process."""


class _Literal:
    """A text that the renderer shows as a Python literal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def _escape(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """Escapes control and bidirectional characters of callers, for a renderer that does not. See structlog."""
    for name, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[name] = escaped(value) if name in ("event", "logger") else _Literal(value)
    return line


def escaped(text: str) -> str:
    """Returns the text with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _print_traceback(file: TextIO, error: ExcInfo) -> None:
    """Prints an exception indented, so that no line of it looks like a log line."""
    for part in traceback.format_exception(*error):
        for line in part.splitlines():
            file.write(f"\n{INDENT}{escaped(without_secrets(line))}")


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
        [_escape, structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=_print_traceback)]
        if pretty
        else [TRACEBACKS, _redact, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not pretty),
            _redact,
            RECENT,
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
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
