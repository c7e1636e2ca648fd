"""Limits of messages and streams: the server's, as far as the client knows them, and the client's own."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from histospec.client.config import Limits
from histospec.protocol.names import LIMITS
from histospec.protocol.refusals import limits_in

UNLIMITED = 1 << 62
OVERHEAD = 128
"""Bytes of a message that are no part of an open, a step's row or a close: sequence, lengths, a step's numbers."""


class ServerLimits(NamedTuple):
    """The limits of a shard for one message and for one stream. A limit that it did not name is unlimited."""

    batch: int = UNLIMITED
    """Sessions in a step, opens, closes; responses of an ingest."""
    message: int = UNLIMITED
    """Bytes of a message."""
    draft: int = UNLIMITED
    """Tokens of a draft that a step may ask for."""
    sessions: int = UNLIMITED
    """Open sessions of a stream."""

    @classmethod
    def told(cls, metadata: Iterable[tuple[str, Any]] | None) -> "ServerLimits":
        """Returns the limits in the answer to Topology; servers before 0.2 name none."""
        said = {str(key): value for key, value in metadata or ()}
        numbers = {field: str(said[name]) for field, name in LIMITS.items() if name in said}
        return cls(**{field: int(number) for field, number in numbers.items() if number.isdecimal() and int(number)})

    def refused(self, details: str) -> "ServerLimits":
        """Returns these limits with the one that a refusal names, if that is smaller."""
        for field, limit in limits_in(details):
            if 0 < limit < getattr(self, field):
                return self._replace(**{field: limit})
        return self


class Room(NamedTuple):
    """The most that the client puts into one message, and on one stream."""

    batch: int
    size: int
    """Bytes of a message that the client aims at; a single part may be larger."""
    most: int
    """Bytes beyond which the server refuses a message."""
    draft: int
    sessions: int

    @classmethod
    def of(cls, own: Limits, server: ServerLimits) -> "Room":
        """Returns the room within the client's own limits and the server's."""
        return cls(
            batch=max(1, min(own.batch, server.batch)),
            size=min(own.message_bytes, server.message - OVERHEAD),
            most=server.message - OVERHEAD,
            draft=server.draft,
            sessions=server.sessions,
        )

    @property
    def running(self) -> int:
        """How many sessions may stay open. The other places are for commits of sessions unknown to the server."""
        return self.sessions - self.sessions // 16 if self.sessions >= 16 else max(1, self.sessions - 1)
