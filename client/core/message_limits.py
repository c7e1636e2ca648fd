"""Limits of messages and streams, the server's and the client's own, and how a message is cut to fit them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from histospec.client.config import Limits
from histospec.protocol.arrays import INT32, UINT64
from histospec.protocol.names import LIMITS
from histospec.protocol.refusals import limits_in
from histospec.v1 import draft_pb2 as pb

UNLIMITED = 1 << 62
_POSITIVE = re.compile("[1-9][0-9]{0,17}")
"""A limit as a server writes it. A longer number, which takes time to read, is no limit."""
OVERHEAD = 128
"""Bytes of a message that are no part of an open, a step's row or a close: sequence, lengths, a step's numbers."""
PART = 8
"""Bytes around an open or a close."""
ROW = 28
"""The most bytes of a step's row, without its tokens."""
ANSWER, ANSWER_ROW, REFUSAL = 1 << 16, 16, 512
"""The most bytes of an answer: all that is in no list, a row without its draft, a refusal with its reason."""
_COUNTS = ("positions", "lengths", "verified", "model_drafted", "model_accepted")
"""Arrays of a step with an int32 for each row; some may be absent."""


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
    def from_metadata(cls, metadata: Iterable[tuple[str, Any]] | None) -> "ServerLimits":
        """Returns the limits in the answer to Topology."""
        given = {str(key): value for key, value in metadata or ()}
        numbers = {field: str(given[name]) for field, name in LIMITS.items() if name in given}
        return cls(**{field: int(number) for field, number in numbers.items() if _POSITIVE.fullmatch(number)})

    def refused(self, details: str) -> "ServerLimits":
        """Returns these limits with the one that a refusal names, if that is smaller."""
        for field, limit in limits_in(details):
            if 0 < limit < getattr(self, field):
                return self._replace(**{field: limit})
        return self


class MessageLimits(NamedTuple):
    """The most that the client puts into one message, and on one stream."""

    batch: int
    size: int
    """Bytes of a message that the client aims at; a single part may be larger."""
    most: int
    """Bytes beyond which the server refuses a message."""
    draft: int
    sessions: int

    @classmethod
    def of(cls, own: Limits, server: ServerLimits) -> "MessageLimits":
        """Returns the limits within the client's own limits and the server's."""
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


class Piece(NamedTuple):
    """One message, and the rows of the whole step that are in it."""

    message: pb.DraftRequest
    rows: Sequence[int]


def cut(message: pb.DraftRequest, limits: MessageLimits) -> list[Piece]:
    """Cuts a message into messages that fit: opens, each before its row of the step, then closes."""
    step = message.step
    if fits(message, limits):
        return [Piece(message, range(len(step.sessions) // UINT64.itemsize))]
    filling = _Filling(limits)
    steps = list(_rows(step))
    opens = {o.session: o for o in message.opens}
    without_row = opens.keys() - {session for session, _ in steps}
    for session, opening in opens.items():
        if session in without_row:
            filling.message_for("opens", opening.ByteSize() + PART).opens.append(opening)
    for row, (session, tokens) in enumerate(steps):
        if session in opens:
            filling.message_for("opens", opens[session].ByteSize() + PART).opens.append(opens[session])
        filling.message_for("rows", ROW + 4 * tokens)
        filling.rows[-1].append(row)
    _share(step, filling)
    for close in message.closes:
        filling.message_for("closes", close.ByteSize() + PART).closes.append(close)
    return [Piece(m, r) for m, r in zip(filling.messages, filling.rows, strict=True)]


def fits(message: pb.DraftRequest, limits: MessageLimits) -> bool:
    """Returns whether a message is within the limits of the server and of the client."""
    numbers = (len(message.opens), len(message.closes), len(message.step.sessions) // UINT64.itemsize)
    return max(numbers) <= limits.batch and message.ByteSize() <= limits.size


def longest_answer(message: pb.DraftRequest) -> int:
    """Returns the most bytes of an answer to a message: its drafts, and what was refused, with the reasons."""
    rows = len(message.step.sessions) // UINT64.itemsize
    parts = rows + len(message.opens) + len(message.closes)
    token = 16 if message.step.runners_up else 8
    return ANSWER + rows * (token * message.step.max_tokens + ANSWER_ROW) + parts * REFUSAL


def too_large(message: pb.DraftRequest, limits: MessageLimits) -> dict[int, str]:
    """Returns the sessions with a part that is larger than any message may be, and the reasons."""
    if message.ByteSize() <= limits.most:
        return {}
    parts = [("open", o.session, o.ByteSize() + PART) for o in message.opens]
    parts += [("step", s, ROW + 4 * n) for s, n in _rows(message.step)]
    parts += [("close", c.session, c.ByteSize() + PART) for c in message.closes]
    return {
        session: f"its {what} takes {size} bytes, more than the server's limit for a message (--max-message) allows"
        for what, session, size in parts
        if size > limits.most
    }


def without(message: pb.DraftRequest, sessions: set[int]) -> tuple[pb.DraftRequest, list[int]]:
    """Returns the message without these sessions, and the rows of its step that stay."""
    rest = pb.DraftRequest(
        opens=[o for o in message.opens if o.session not in sessions],
        closes=[c for c in message.closes if c.session not in sessions],
    )
    stay = [row for row, (session, _) in enumerate(_rows(message.step)) if session not in sessions]
    if stay:
        rest.step.CopyFrom(_take(message.step, stay))
    return rest, stay


def _rows(step: pb.Step) -> Iterator[tuple[int, int]]:
    numbers = np.frombuffer(step.sessions, UINT64).tolist()
    return zip(numbers, np.frombuffer(step.lengths, INT32).tolist(), strict=True)


class _Filling:
    """Messages that are filled one after the other."""

    def __init__(self, limits: MessageLimits) -> None:
        self.messages = [pb.DraftRequest()]
        self.rows: list[list[int]] = [[]]
        self._limits = limits
        self._size = 0
        self._numbers = {"opens": 0, "rows": 0, "closes": 0}

    def message_for(self, kind: str, size: int) -> Any:
        """Returns the message that the next part goes into."""
        if self._size and (self._size + size > self._limits.size or self._numbers[kind] >= self._limits.batch):
            self.messages.append(pb.DraftRequest())
            self.rows.append([])
            self._size, self._numbers = 0, dict.fromkeys(self._numbers, 0)
        self._size += size
        self._numbers[kind] += 1
        return self.messages[-1]


def _share(step: pb.Step, filling: _Filling) -> None:
    """Puts the rows of a step into the messages that were filled for them."""
    late = step.late
    for message, rows in zip(filling.messages, filling.rows, strict=True):
        if rows:
            message.step.CopyFrom(_take(step, rows))
            message.step.late, late = late, 0


def _take(step: pb.Step, rows: Sequence[int]) -> pb.Step:
    """Returns the step of these rows alone."""
    chosen = np.array(rows, np.int64)
    lengths = np.frombuffer(step.lengths, INT32)
    starts = np.concatenate(([0], np.cumsum(lengths.astype(np.int64))))
    tokens = [step.tokens[4 * starts[row] : 4 * starts[row + 1]] for row in rows]
    taken = pb.Step(
        sessions=np.frombuffer(step.sessions, UINT64)[chosen].tobytes(),
        tokens=b"".join(tokens),
    )
    for name in _COUNTS:
        if counts := getattr(step, name):
            setattr(taken, name, np.frombuffer(counts, INT32)[chosen].tobytes())
    taken.max_tokens, taken.verify_cost, taken.late = step.max_tokens, step.verify_cost, step.late
    taken.runners_up = step.runners_up
    return taken
