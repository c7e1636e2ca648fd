"""Large work in slices, so that the steps of other streams have their turn.

The event loop and the engine's lock belong to everybody: no message holds them for longer than the steps below take,
however much it asks for. Work is counted in tokens, because that is what it costs.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from histospec.native import Engine
from histospec.server import encoded
from histospec.server.errors import InvalidRequest
from histospec.server.wire import INT32
from histospec.v1 import draft_pb2 as pb

SESSIONS = 256
"""In one call of the engine: a few milliseconds."""
TOKENS = 1 << 14
"""Appended in one call of the engine, and worked on between two turns of others."""

LARGE_MESSAGE = 1 << 20
"""Bytes from which on a message of a stream is decoded part by part."""

Drafts = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float32]]


class Turns:
    """Counts the work that one message makes, and gives others their turn after each slice of it."""

    def __init__(self) -> None:
        self._work = 0

    async def after(self, work: int) -> None:
        """So many tokens were worked on. Others have their turn if that makes a slice."""
        self._work += work
        if self._work >= TOKENS:
            await self.now()

    async def now(self) -> None:
        """Others have their turn."""
        self._work = 0
        await asyncio.sleep(0)


def unless_large(decode: Callable[[bytes], pb.DraftRequest]) -> Callable[[bytes], pb.DraftRequest | bytes]:
    """`decode`, but a large message stays as it is, for `decode` below: gRPC would have it decoded at once."""
    return lambda data: data if len(data) > LARGE_MESSAGE else decode(data)


async def decode(data: bytes, turns: Turns) -> pb.DraftRequest:
    """A large message. Raises InvalidRequest."""
    request = pb.DraftRequest()
    start = 0
    try:
        for _, _, _, end in encoded.fields(data, 0, len(data)):
            request.MergeFromString(data[start:end])
            await turns.after((end - start) // INT32.itemsize)
            start = end
    except DecodeError:
        raise InvalidRequest(f"message: its {len(data)} bytes are not a DraftRequest") from None
    return request


class Asked(NamedTuple):
    """What a step asks of the engine, as `Engine.step` takes it."""

    sessions: NDArray[np.int64]
    """[B]"""
    tokens: NDArray[np.int32]
    """[T], flat."""
    offsets: NDArray[np.int64]
    """[B + 1]"""
    positions: NDArray[np.int64]
    """[B]: generated tokens of each session before these."""
    max_tokens: int
    verify_cost: float
    tail_weight: float


async def step(engine: Engine, asked: Asked, turns: Turns) -> Drafts:
    """`Engine.step` in as many calls as it takes. Drafts as one call does: first all append, then all draft.

    Only `tail_weight` looks at each 256 sessions on their own.
    """
    if len(asked.sessions) <= SESSIONS and asked.tokens.size <= TOKENS:
        return _call(engine, asked)
    for part in _appends(asked):
        _call(engine, part)
        await turns.now()
    if asked.max_tokens == 0:
        return np.empty(0, np.int32), np.zeros(len(asked.sessions) + 1, np.int64), np.empty(0, np.float32)
    drafts = []
    for part in _drafts(asked):
        drafts.append(_call(engine, part))
        await turns.now()
    tokens, offsets, probs = zip(*drafts, strict=True)
    lengths = np.concatenate([np.diff(some) for some in offsets])
    return np.concatenate(tokens), np.concatenate(([0], np.cumsum(lengths))), np.concatenate(probs)


def _call(engine: Engine, asked: Asked) -> Drafts:
    return engine.step(
        asked.sessions,
        asked.tokens,
        asked.offsets,
        max_tokens=asked.max_tokens,
        verify_cost=asked.verify_cost,
        positions=asked.positions,
        tail_weight=asked.tail_weight,
    )


def _appends(asked: Asked) -> Iterator[Asked]:
    """The tokens of a step in the order of its sessions, a slice at a time.

    Only a text longer than TOKENS is cut: a session learns from its last draft with the first call that has its tokens.
    """
    offsets = asked.offsets
    start = 0
    while start < asked.tokens.size:
        first = int(np.searchsorted(offsets, start, "right")) - 1
        last = min(int(np.searchsorted(offsets, start + TOKENS, "right")) - 1, first + SESSIONS)
        end = int(offsets[last]) if last > first else start + TOKENS
        last = max(last, first + 1)
        cut = np.clip(offsets[first : last + 1], start, end)
        yield asked._replace(
            sessions=asked.sessions[first:last],
            tokens=asked.tokens[start:end],
            offsets=cut - start,
            positions=asked.positions[first:last] + cut[:-1] - offsets[first:last],
            max_tokens=0,
        )
        start = end


def _drafts(asked: Asked) -> Iterator[Asked]:
    """The drafts of a step whose sessions have their tokens, at most SESSIONS at a time."""
    ends = asked.positions + np.diff(asked.offsets)
    for start in range(0, len(asked.sessions), SESSIONS):
        sessions = asked.sessions[start : start + SESSIONS]
        yield asked._replace(
            sessions=sessions,
            tokens=np.empty(0, np.int32),
            offsets=np.zeros(len(sessions) + 1, np.int64),
            positions=ends[start : start + SESSIONS],
        )
