"""Cuts large work into slices, so that the steps of other streams run in between.

All streams share the event loop and the engine's lock. No message holds them for longer than the limits below, however
large it is. The unit of work is a token, because tokens determine the cost.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from histospec.native import STEPPED, Engine
from histospec.server.rpc import encoded
from histospec.server.rpc.wire import Report
from histospec.v1 import draft_pb2 as pb

SESSIONS, DRAFTED = 256, 128
"""Sessions that one call of the engine takes, a few milliseconds; and for which a slice of a longer step drafts."""
TOKENS = 1 << 12
"""Tokens of work in a slice: the engine appends them in less than half a millisecond."""
TURNS = 6
"""Turns of the event loop between two slices. A message of another stream needs several until its step runs."""
SESSION_WORK = 256
"""The minimum work of an open or a close, in tokens."""
DECODED = 16
"""Bytes of a message that decode in the time of one token."""

MANY = 64
"""Responses, or opens and closes, of a message that are checked on the event loop: less than a millisecond."""

LARGE_MESSAGE = 1 << 20
"""Messages of a stream from this size in bytes on are decoded part by part."""


class Pacer:
    """Counts the work of one message, and yields to the event loop after each slice."""

    def __init__(self) -> None:
        self._work = 0

    async def after(self, work: int) -> None:
        """Counts `work` tokens. Yields if the slice is full."""
        self._work += work
        if self._work >= TOKENS:
            await self.now()

    async def now(self) -> None:
        """Yields."""
        self._work = 0
        for _ in range(TURNS):
            await asyncio.sleep(0)


async def close(sessions: Sequence[int], close_one: Callable[[int], object]) -> None:
    """Closes all sessions, in slices."""
    pacer = Pacer()
    for session in sessions:
        close_one(session)
        await pacer.after(SESSION_WORK)


def unless_large(decode: Callable[[bytes], pb.DraftRequest]) -> Callable[[bytes], pb.DraftRequest | bytes]:
    """Returns `decode`, except that large messages stay encoded for `decode` below; gRPC would decode them at once."""
    return lambda data: data if len(data) > LARGE_MESSAGE else decode(data)


async def decode(data: bytes, pacer: Pacer) -> pb.DraftRequest:
    """Decodes a large message part by part. Raises InvalidRequest."""
    request = pb.DraftRequest()
    start = 0
    try:
        for _, _, _, end in encoded.fields(data, 0, len(data)):
            request.MergeFromString(data[start:end])
            await pacer.after((end - start) // DECODED)
            start = end
    except DecodeError:
        raise encoded.not_a("DraftRequest", data) from None
    return request


class StepRequest(NamedTuple):
    """The arguments of `Engine.step`."""

    sessions: NDArray[np.int64]
    """[B]"""
    tokens: NDArray[np.int32]
    """[T], flat."""
    offsets: NDArray[np.int64]
    """[B + 1]"""
    positions: NDArray[np.int64]
    """[B]: generated tokens of each session before these."""
    most_tokens: int
    """The maximum tokens of a session."""
    max_tokens: int
    verify_cost: float
    report: Report | None = None
    runners_up: bool = False

    def of(self, rows: NDArray[np.int64]) -> "StepRequest":
        """Returns these rows alone, in ascending order."""
        new = np.diff(self.offsets)
        chosen = np.zeros(len(new), bool)
        chosen[rows] = True
        return self._replace(
            sessions=self.sessions[rows],
            tokens=self.tokens[np.repeat(chosen, new)],
            offsets=np.concatenate(([0], np.cumsum(new[rows]))),
            positions=self.positions[rows],
            report=self.report and self.report.of(rows),
        )

    def without_tokens(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> "StepRequest":
        """Returns a request for drafts of these rows alone, which now have `positions` tokens."""
        return self._replace(
            sessions=self.sessions[rows],
            tokens=np.empty(0, np.int32),
            offsets=np.zeros(len(rows) + 1, np.int64),
            positions=positions,
            report=self.report and self.report.of(rows),
        )


class StepResult(NamedTuple):
    """What `Engine.step` returns."""

    tokens: NDArray[np.int32]
    """[D], flat: the drafts."""
    offsets: NDArray[np.int64]
    """[B + 1]"""
    probs: NDArray[np.float32]
    """[D]"""
    outcomes: NDArray[np.uint8]
    """[B]: a session was left out unless its outcome is STEPPED."""
    runner_up_tokens: NDArray[np.int32] = np.empty(0, np.int32)
    """[D] if asked for: the most probable other token in the place of each, or -1."""
    runner_up_probs: NDArray[np.float32] = np.empty(0, np.float32)
    """[D] if asked for."""


async def step(engine: Engine, asked: StepRequest, pacer: Pacer) -> StepResult:
    """Runs `Engine.step` in slices. Drafts like a single call: first all sessions append, then all draft."""
    if len(asked.sessions) <= SESSIONS and asked.tokens.size <= TOKENS:
        return _call(engine, asked)
    outcomes = np.zeros(len(asked.sessions), np.uint8)
    for first, part in _appends(asked):
        _note(outcomes, first, _call(engine, part))
        await pacer.now()
    drafts = []
    ends = asked.positions + np.diff(asked.offsets)
    for first in range(0, len(asked.sessions), DRAFTED):
        rows = np.arange(first, min(first + DRAFTED, len(asked.sessions)))
        drafts.append(_call(engine, asked.without_tokens(rows, ends[rows])))
        _note(outcomes, first, drafts[-1])
        await pacer.now()
    lengths = np.concatenate([np.diff(some.offsets) for some in drafts])
    return StepResult(
        np.concatenate([some.tokens for some in drafts]),
        np.concatenate(([0], np.cumsum(lengths))),
        np.concatenate([some.probs for some in drafts]),
        outcomes,
        np.concatenate([some.runner_up_tokens for some in drafts]),
        np.concatenate([some.runner_up_probs for some in drafts]),
    )


def _note(outcomes: NDArray[np.uint8], first: int, part: StepResult) -> None:
    """Records the outcomes of the sessions from `first` on. The first reason for leaving out a session stays."""
    mine = outcomes[first : first + len(part.outcomes)]
    mine[:] = np.where(mine == STEPPED, part.outcomes, mine)


def _call(engine: Engine, asked: StepRequest) -> StepResult:
    return StepResult(
        *engine.step(
            asked.sessions,
            asked.tokens,
            asked.offsets,
            positions=asked.positions,
            most_tokens=asked.most_tokens,
            max_tokens=asked.max_tokens,
            verify_cost=asked.verify_cost,
            **({} if asked.report is None else asked.report._asdict()),
            runners_up=asked.runners_up,
        )
    )


def _appends(asked: StepRequest) -> Iterator[tuple[int, StepRequest]]:
    """Yields the tokens of a step in the order of its sessions, in slices, and the first row of each slice.

    Cuts only a text longer than TOKENS: a session learns from its last draft with the first call that has its tokens.
    """
    offsets = asked.offsets
    start = 0
    while start < asked.tokens.size:
        first = int(np.searchsorted(offsets, start, "right")) - 1
        last = min(int(np.searchsorted(offsets, start + TOKENS, "right")) - 1, first + SESSIONS)
        end = int(offsets[last]) if last > first else start + TOKENS
        last = max(last, first + 1)
        cut = np.clip(offsets[first : last + 1], start, end)
        report = asked.report and asked.report.of(slice(first, last))
        if report and start > offsets[first]:  # already reported with the first slice of this text
            report = report.without_first()
        yield (
            first,
            asked._replace(
                sessions=asked.sessions[first:last],
                tokens=asked.tokens[start:end],
                offsets=cut - start,
                positions=asked.positions[first:last] + cut[:-1] - offsets[first:last],
                max_tokens=0,
                report=report,
            ),
        )
        start = end
