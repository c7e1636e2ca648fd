"""Callers that the server rejected lately because of their token, for the log and the hints."""

import math
import time
from dataclasses import dataclass

import structlog

from histospec.server.errors import PermissionDenied, Unauthenticated
from histospec.server.logs.lines import Throttle

log = structlog.get_logger()

REJECTED = (Unauthenticated, PermissionDenied)
LATELY = 600.0  # seconds for which the last call of a kind counts
KINDS = 50  # that are kept: a caller chooses its token and its namespace, and so the reason
EVERY = 60.0  # seconds between two log lines with the same reason


@dataclass
class Rejected:
    """Calls that the server rejected for one reason, which names the token."""

    reason: str
    calls: int = 0
    method: str = ""
    """Of the last of these calls."""
    peer: str = ""
    """The address that it came from."""
    last: float = 0.0
    logged: float = -math.inf


class Rejections:
    """The rejected calls of the last minutes, by reason. Used only on the event loop."""

    def __init__(self) -> None:
        self._kinds: dict[str, Rejected] = {}  # by reason, the one with the oldest last call first
        self._throttle = Throttle()

    def add(self, method: str, code: str, peer: str, reason: str, now: float | None = None) -> None:
        """Counts a call. Logs a warning for the first one with this reason, and then once a minute."""
        now = time.monotonic() if now is None else now
        kind = self._kinds.pop(reason, None) or Rejected(reason)
        self._kinds[reason] = kind
        kind.calls, kind.method, kind.peer, kind.last = kind.calls + 1, method, peer, now
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        if now - kind.logged >= EVERY and (more := self._throttle.admits(code, now)) is not None:
            kind.logged = now
            log.warning("rpc refused", method=method, code=code, peer=peer, reason=reason, calls=kind.calls, **more)

    def lately(self, now: float | None = None) -> list[Rejected]:
        """Returns the kinds with a call in the last ten minutes, most calls first; `calls` are all since the first."""
        now = time.monotonic() if now is None else now
        self._kinds = {reason: kind for reason, kind in self._kinds.items() if now - kind.last < LATELY}
        return sorted(self._kinds.values(), key=lambda kind: -kind.calls)
