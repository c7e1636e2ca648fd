"""What strangers named, as a terminal may show it: control characters, and those that turn text round, are escaped."""

import traceback
from typing import TextIO

from structlog.typing import EventDict, ExcInfo, WrappedLogger

INDENT = "    "


class _Quoted:
    """A text that the renderer shows as Python would write it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return repr(self._text)


def visible(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """A structlog processor for a renderer that shows texts as they are."""
    for name, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[name] = escaped(value) if name in ("event", "logger") else _Quoted(value)
    return line


def escaped(text: str) -> str:
    """Without a character that is not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def visible_traceback(file: TextIO, error: ExcInfo) -> None:
    """Shows an exception; indented, so that no line of what it quotes looks like one of the log."""
    for part in traceback.format_exception(*error):
        for line in part.splitlines():
            file.write(f"\n{INDENT}{escaped(line)}")
