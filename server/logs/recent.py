"""The last warnings and errors of the log, for the status page."""

import re
import sys
from collections import deque

from structlog.typing import EventDict, WrappedLogger

LINES = 50
LONGEST = 300  # characters of one value
LEVELS = ("warning", "error", "critical")
_USER = re.compile(r"(?<=://)[^/@\s]*@")
_SECRET = re.compile(r"(?i)\b(bearer\s+|(?:password|secret|token)\s*[=:]\s*)[^\s,;]+")


class RecentLines:
    """A structlog processor that keeps the last lines of these levels and passes all lines on unchanged."""

    def __init__(self) -> None:
        self._lines: deque[dict[str, str]] = deque(maxlen=LINES)

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        """Keeps the line. See structlog."""
        if line.get("level") in LEVELS:
            self._lines.append(_kept(line))
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
        "event": without_secrets(str(line.get("event", ""))),
        "details": ", ".join(f"{name}: {without_secrets(str(value))}" for name, value in details.items()),
    }


def without_secrets(text: str) -> str:
    """Returns a text without user names, passwords and tokens, cut to the length of a line."""
    text = _SECRET.sub(r"\1…", _USER.sub("…@", text))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
