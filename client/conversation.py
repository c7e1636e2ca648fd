"""One Draft stream as the client sees it: what the server holds, what it still owes. No I/O in here.

A conversation lives as long as its stream. When the stream ends the conversation is thrown away as a whole, and the
next one starts knowing nothing, which is what makes every session reopen by itself.

Messages are put into `outbox` in the order of their sequence; whoever owns the stream writes them in that order.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.budget import Budget
from histospec.client.config import Limits
from histospec.client.session import Commit, Session
from histospec.client.tokens import FLOAT32, INT32
from histospec.v1 import draft_pb2 as pb

UINT64 = np.dtype("<u8")


class GarbledReply(Exception):  # noqa: N818 - what it is
    """A response that does not add up; nothing after it can be trusted."""


class Batch(NamedTuple):
    """The sessions of a step, which have their new tokens already."""

    sessions: list[Session]
    before: list[int]
    """How many tokens each had without the new ones."""
    lengths: list[int]
    """How many new ones each got."""
    tokens: bytes
    """The new ones, one session after the other."""

    def take(self, rows: Sequence[int]) -> "Batch":
        """The batch of these rows alone."""
        sessions = [self.sessions[i] for i in rows]
        before = [self.before[i] for i in rows]
        tokens = b"".join([s.generated[4 * b : 4 * s.length] for s, b in zip(sessions, before, strict=True)])
        return Batch(sessions, before, [self.lengths[i] for i in rows], tokens)


class Drafts(NamedTuple):
    """The drafts of one reply, flat."""

    offsets: list[int]
    """[B + 1]"""
    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]


class Reply(NamedTuple):
    """What one response meant."""

    sequence: int
    drafts: Drafts | None
    """None where the message had no step, or where nobody waits for it any more."""
    acknowledged: list[Commit]
    postponed: list[Commit]
    """Commits that the store could not take now."""
    why_postponed: str
    unknown: list[Commit]
    """Commits of sessions that the server does not hold."""
    turned_down: list[Commit]
    """Commits of sessions that it refused."""
    refused: dict[int, str]
    """Sessions that will never draft, and why."""


@dataclass
class Conversation:
    """What was said on one stream."""

    namespace: str
    limits: Limits
    outbox: deque[pb.DraftRequest] = field(default_factory=deque)
    waiting: dict[int, int] = field(default_factory=dict)
    """By sequence: how many sessions the step had whose drafts somebody waits for."""
    commits: dict[int, list[Commit]] = field(default_factory=dict)
    """By sequence: commits that are not acknowledged."""
    held: dict[int, int] = field(default_factory=dict)
    """By session: how many generated tokens the server has."""
    heard: float | None = None
    """When the stream last said something; None until it owes an answer."""
    written: int = 0
    """The last message that gRPC has taken."""
    reopened: int = 0
    """Sessions that were open before, on this stream or another."""
    late: int = 0
    """Steps whose drafts came too late, which the server is to hear of with the next step."""
    _opened: dict[int, int] = field(default_factory=dict)
    """By session: the message that opened it last."""
    _sequence: int = 0

    @property
    def settled(self) -> bool:
        """Whether everything is written and every commit acknowledged."""
        return self.written == self._sequence and not self.commits

    @property
    def owes(self) -> bool:
        """Whether the server has still to answer something."""
        return bool(self.waiting or self.commits)

    # ---- what the client says -------------------------------------------------------------------------------------

    def open(self, sessions: Iterable[Session]) -> None:
        """Opens what the server does not hold, up to all that was generated."""
        strange = [s for s in sessions if s.number not in self.held]
        lengths = [s.length for s in strange]
        message = self._open_some(Batch(strange, lengths, [], b""), [None] * len(strange))
        if message.opens:
            self._say(message)

    def step(self, batch: Batch, budget: Budget, now: float) -> int:
        """Says one step. -> its sequence.

        A session that the server does not hold is opened with what it had before, so that its step is still a step.
        """
        message = pb.DraftRequest()
        numbers = [s.number for s in batch.sessions]
        starts = list(map(self.held.get, numbers))
        lengths, tokens = batch.lengths, batch.tokens
        if starts != batch.before:  # some are to be opened, or gained tokens while nothing was sent
            message = self._open_some(batch, starts)
            pieces = [s.generated[4 * self.held[s.number] : 4 * s.length] for s in batch.sessions]
            lengths, tokens = [len(piece) // 4 for piece in pieces], b"".join(pieces)
        positions = list(map(self.held.__getitem__, numbers))
        self.held.update((s.number, s.length) for s in batch.sessions)
        step = message.step
        step.sessions = np.array(numbers, UINT64).tobytes()
        step.positions = np.array(positions, INT32).tobytes()
        step.lengths = np.array(lengths, INT32).tobytes()
        step.tokens = tokens
        step.max_tokens, step.verify_cost, step.tail_weight = budget
        step.late, self.late = self.late, 0
        sequence = self._say(message)
        if budget.max_tokens:
            self.waiting[sequence] = len(numbers)
            self._expect(now)
        return sequence

    def _open_some(self, batch: Batch, starts: Sequence[int | None]) -> pb.DraftRequest:
        """Opens those that have no start; the last message of them is still to be said."""
        message, size = pb.DraftRequest(), 0
        for session, length, start in zip(batch.sessions, batch.before, starts, strict=True):
            if start is None:
                if size > self.limits.message_bytes:
                    self._say(message)
                    message, size = pb.DraftRequest(), 0
                self._open(message, session, length)
                size += len(session.prompt) + 4 * length
        return message

    def close(self, commits: Sequence[Commit], sessions: Iterable[int], now: float) -> None:
        """Closes: with commit (opening first what the server does not hold), and without."""
        # They gained tokens while nothing was sent.
        behind = [c.session for c in commits if self.held.get(c.session.number, c.session.length) < c.session.length]
        if behind:
            self.step(Batch(behind, [s.length for s in behind], [], b""), Budget(max_tokens=0), now)
        message, size, batch = pb.DraftRequest(), 0, list[Commit]()

        def say() -> None:
            nonlocal message, size, batch
            sequence = self._say(message)
            if batch:
                self.commits[sequence] = batch
                self._expect(now)
            message, size, batch = pb.DraftRequest(), 0, []

        for commit in commits:
            session = commit.session
            if session.number not in self.held:
                self._open(message, session, session.length)
            message.closes.add(
                session=session.number,
                commit=True,
                epoch=commit.epoch,
                reward=commit.reward,
                logprobs=commit.logprobs,
                generated=session.length,
                changes=commit.changes,
            )
            self._forget(session.number)
            batch.append(commit)
            size += commit.bytes
            if size > self.limits.message_bytes or len(batch) >= self.limits.batch:
                say()
        for number in sessions:
            if number in self.held:
                message.closes.add(session=number, generated=self.held[number])
                self._forget(number)
        if message.closes:
            say()

    def _open(self, message: pb.DraftRequest, session: Session, length: int) -> None:
        message.opens.add(
            session=session.number,
            namespace=self.namespace,
            prompt=session.prompt,
            problem=session.problem,
            generated=bytes(session.generated[: 4 * length]),
            seed=session.seed,
        )
        self.reopened += session.opened
        session.opened = True
        self.held[session.number] = length
        self._opened[session.number] = self._sequence + 1

    def _forget(self, session: int) -> None:
        self.held.pop(session, None)
        self._opened.pop(session, None)

    def _say(self, message: pb.DraftRequest) -> int:
        self._sequence += 1
        message.sequence = self._sequence
        self.outbox.append(message)
        return self._sequence

    def _expect(self, now: float) -> None:
        if self.heard is None:
            self.heard = now

    # ---- what the server answers ----------------------------------------------------------------------------------

    def hear(self, response: pb.DraftResponse, now: float) -> Reply:
        """What a response means.

        Raises:
            GarbledReply: it does not add up.
        """
        sequence = response.sequence
        if not 0 < sequence <= self._sequence:
            raise GarbledReply(f"sequence: {sequence} was never sent")
        sessions = self.waiting.get(sequence)
        drafts = None if sessions is None else _drafts(response, sessions)
        unknown = set(_array("unknown", response.unknown, UINT64).tolist())
        refused = {r.session: r.reason for r in response.refusals if not r.later}
        later = {r.session: r.reason for r in response.refusals if r.later}
        self.waiting.pop(sequence, None)
        commits = self.commits.pop(sequence, [])
        self.heard = now if self.owes else None
        for number in unknown:
            if self._opened.get(number, sequence + 1) <= sequence:  # not opened again in the meantime
                self._forget(number)
        return Reply(
            sequence=sequence,
            drafts=drafts,
            acknowledged=[c for c in commits if c.session.number not in {*unknown, *refused, *later}],
            postponed=[c for c in commits if c.session.number in later and c.session.number not in unknown],
            why_postponed=next(iter(later.values()), ""),
            unknown=[c for c in commits if c.session.number in unknown],
            turned_down=[c for c in commits if c.session.number in refused and c.session.number not in unknown],
            refused=refused,
        )


def _drafts(response: pb.DraftResponse, sessions: int) -> Drafts:
    lengths = _array("lengths", response.lengths, INT32)
    tokens = _array("tokens", response.tokens, INT32)
    probs = _array("probs", response.probs, FLOAT32)
    if len(lengths) != sessions:
        raise GarbledReply(f"lengths: {len(lengths)} drafts for {sessions} sessions")
    if (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != len(tokens) or len(probs) != len(tokens):
        raise GarbledReply(f"lengths: they do not add up to {len(tokens)} tokens and {len(probs)} probabilities")
    if (tokens < 0).any():
        raise GarbledReply(f"tokens: {tokens.min()} is negative")
    return Drafts([0, *np.cumsum(lengths).tolist()], tokens, probs)


def _array(name: str, data: bytes, dtype: np.dtype) -> NDArray:  # type: ignore[type-arg]
    if len(data) % dtype.itemsize:
        raise GarbledReply(f"{name}: {len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)
