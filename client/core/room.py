"""How much a message may hold: the server's limits, as far as they are known, and the client's own."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from histospec.client.config import Limits
from histospec.protocol.names import LIMITS
from histospec.protocol.refusals import limits_in

UNLIMITED = 1 << 62
OVERHEAD = 128
"""Bytes of a message that are no part of an open, a step's row or a close: sequence, lengths, a step's numbers."""


class ServerLimits(NamedTuple):
    """What a shard takes at most, in one message and on one stream. What it did not say is unlimited."""

    batch: int = UNLIMITED
    """Sessions in a step, opens, closes; responses of an ingest."""
    message: int = UNLIMITED
    """Bytes."""
    draft: int = UNLIMITED
    """Tokens of a draft that a step may ask for."""
    sessions: int = UNLIMITED
    """Open sessions of a stream."""

    @classmethod
    def told(cls, metadata: Iterable[tuple[str, Any]] | None) -> "ServerLimits":
        """As the answer to Topology says them; servers before 0.2 say none."""
        said = {str(key): value for key, value in metadata or ()}
        numbers = {field: str(said[name]) for field, name in LIMITS.items() if name in said}
        return cls(**{field: int(number) for field, number in numbers.items() if number.isdecimal() and int(number)})

    def refused(self, details: str) -> "ServerLimits":
        """With the limit that a refusal names, where that is smaller than what was known."""
        for field, limit in limits_in(details):
            if 0 < limit < getattr(self, field):
                return self._replace(**{field: limit})
        return self


class Room(NamedTuple):
    """What the client puts into one message, and on one stream, at most."""

    batch: int
    size: int
    """Bytes that it aims at; one part alone may be larger ..."""
    most: int
    """... but not larger than this: the server would refuse it."""
    draft: int
    sessions: int

    @classmethod
    def of(cls, own: Limits, server: ServerLimits) -> "Room":
        """Within the client's own limits and the server's."""
        return cls(
            batch=max(1, min(own.batch, server.batch)),
            size=min(own.message_bytes, server.message - OVERHEAD),
            most=server.message - OVERHEAD,
            draft=server.draft,
            sessions=server.sessions,
        )

    @property
    def running(self) -> int:
        """Sessions that may stay open: some places stay free for commits of sessions that the server does not hold."""
        return self.sessions - self.sessions // 16 if self.sessions >= 16 else max(1, self.sessions - 1)
