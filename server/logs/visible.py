"""Escapes control and bidirectional characters in text from callers, so that a terminal can show it safely."""

import traceback
from typing import TextIO

from structlog.typing import EventDict, ExcInfo, WrappedLogger

INDENT = "    "


class _Quoted:
    """A text that the renderer shows as a Python literal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def visible(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """A structlog processor for a renderer that does not escape text."""
    for name, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[name] = escaped(value) if name in ("event", "logger") else _Quoted(value)
    return line


def escaped(text: str) -> str:
    """Returns the text with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def visible_traceback(file: TextIO, error: ExcInfo) -> None:
    """Prints an exception indented, so that no line of it looks like a log line."""
    for part in traceback.format_exception(*error):
        for line in part.splitlines():
            file.write(f"\n{INDENT}{escaped(line)}")
