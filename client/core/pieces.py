"""Cuts a message into messages that fit, by number of sessions and by bytes. Finds the sessions that fit into none."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from histospec.client.core.room import Room
from histospec.protocol.arrays import INT32, UINT64
from histospec.v1 import draft_pb2 as pb

PART = 8
"""Bytes around an open or a close."""
ROW = 28
"""The most bytes of a step's row, without its tokens."""
_COUNTS = ("positions", "lengths", "verified", "model_drafted", "model_accepted")
"""Arrays of a step with an int32 for each row; some may be absent."""


class Piece(NamedTuple):
    """One message, and the rows of the whole step that are in it."""

    message: pb.DraftRequest
    rows: Sequence[int]


def cut(message: pb.DraftRequest, room: Room) -> list[Piece]:
    """Cuts a message into messages that fit: opens, each before its row of the step, then closes."""
    step = message.step
    if fits(message, room):
        return [Piece(message, range(len(step.sessions) // UINT64.itemsize))]
    filling = _Filling(room)
    steps = list(_rows(step))
    opens = {o.session: o for o in message.opens}
    without_row = opens.keys() - {session for session, _ in steps}
    for session, opening in opens.items():
        if session in without_row:
            filling.room_for("opens", opening.ByteSize() + PART).opens.append(opening)
    for row, (session, tokens) in enumerate(steps):
        if session in opens:
            filling.room_for("opens", opens[session].ByteSize() + PART).opens.append(opens[session])
        filling.room_for("rows", ROW + 4 * tokens)
        filling.rows[-1].append(row)
    _share(step, filling)
    for close in message.closes:
        filling.room_for("closes", close.ByteSize() + PART).closes.append(close)
    return [Piece(m, r) for m, r in zip(filling.messages, filling.rows, strict=True)]


def fits(message: pb.DraftRequest, room: Room) -> bool:
    """Returns whether a message is within the limits of the server and of the client."""
    numbers = (len(message.opens), len(message.closes), len(message.step.sessions) // UINT64.itemsize)
    return max(numbers) <= room.batch and message.ByteSize() <= room.size


def too_large(message: pb.DraftRequest, room: Room) -> dict[int, str]:
    """Returns the sessions with a part that is larger than any message may be, and the reasons."""
    if message.ByteSize() <= room.most:
        return {}
    parts = [("open", o.session, o.ByteSize() + PART) for o in message.opens]
    parts += [("step", s, ROW + 4 * n) for s, n in _rows(message.step)]
    parts += [("close", c.session, c.ByteSize() + PART) for c in message.closes]
    return {
        session: f"its {what} takes {size} bytes, more than the server's limit for a message (--max-message) allows"
        for what, session, size in parts
        if size > room.most
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

    def __init__(self, room: Room) -> None:
        self.messages = [pb.DraftRequest()]
        self.rows: list[list[int]] = [[]]
        self._room = room
        self._size = 0
        self._numbers = {"opens": 0, "rows": 0, "closes": 0}

    def room_for(self, kind: str, size: int) -> Any:
        """Returns the message that the next part goes into."""
        if self._size and (self._size + size > self._room.size or self._numbers[kind] >= self._room.batch):
            self.messages.append(pb.DraftRequest())
            self.rows.append([])
            self._size, self._numbers = 0, dict.fromkeys(self._numbers, 0)
        self._size += size
        self._numbers[kind] += 1
        return self.messages[-1]


def _share(step: pb.Step, filling: _Filling) -> None:
    """Puts the rows of a step into the messages that have room for them."""
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
    return taken
