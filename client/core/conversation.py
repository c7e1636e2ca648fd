"""One Draft stream as the client sees it: what the server holds, and what it still owes. Does no I/O.

A conversation lives as long as its stream. When the stream ends, the core discards the whole conversation. The next one
starts empty, so it opens every session again.

The conversation puts messages into `outbox` in the order of their sequence; the owner of the stream writes them in that
order.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from struct import pack
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.config import Limits
from histospec.client.core import pieces
from histospec.client.core.budget import Budget, StepInput
from histospec.client.core.pace import Flow
from histospec.client.core.room import UNLIMITED, Room, ServerLimits
from histospec.client.core.session import Commit, Session
from histospec.protocol.arrays import FLOAT32, INT32, UINT64
from histospec.v1 import draft_pb2 as pb

NOTHING: Mapping[int, str] = MappingProxyType({})


class GarbledReply(Exception):  # noqa: N818 - what it is
    """A response contradicts itself or what was sent; nothing after it can be trusted."""


class Drafts(NamedTuple):
    """The drafts of one reply, flat."""

    offsets: list[int]
    """[B + 1]"""
    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]


class Awaited(NamedTuple):
    """The rows of a step whose drafts a message has to bring."""

    step: int
    rows: Sequence[int]
    """Rows of that step."""


class Reply(NamedTuple):
    """The meaning of one response."""

    awaited: Awaited | None
    """None if the message had no step, or if the caller has stopped waiting."""
    drafts: Drafts | None
    """One for each of the rows."""
    acknowledged: Sequence[Commit] = ()
    postponed: Sequence[Commit] = ()
    """Commits that the store could not take now."""
    why_postponed: str = ""
    unknown: Sequence[Commit] = ()
    """Commits of sessions that the server does not hold."""
    turned_down: Sequence[Commit] = ()
    """Commits of sessions that the server refused."""
    refused: Mapping[int, str] = NOTHING
    """Sessions that will never get drafts, and the reasons."""


@dataclass
class Conversation:
    """The state of one stream."""

    namespace: str
    limits: Limits
    server: ServerLimits = field(default_factory=ServerLimits)
    """What the shard accepts, as far as the client knows."""
    outbox: deque[pb.DraftRequest] = field(default_factory=deque)
    waiting: dict[int, Awaited] = field(default_factory=dict)
    """By sequence: the rows whose drafts the caller waits for. A large step has several messages."""
    commits: dict[int, list[Commit]] = field(default_factory=dict)
    """By sequence: commits that the server has not acknowledged."""
    held: dict[int, int] = field(default_factory=dict)
    """By session: how many generated tokens the server has."""
    flow: Flow = field(default_factory=Flow)
    """The bytes on their way."""
    connected: bool = False
    """Whether the shard has answered on this stream's connection; the client writes nothing before."""
    behind: list[Session] = field(default_factory=list)
    """Sessions that the last step left out; the client opens them after it."""
    heard: float | None = None
    """When the last answer arrived, or the client began to wait for one; None while the server owes no answer."""
    written: int = 0
    """The last message that gRPC has taken."""
    reopened: int = 0
    """Sessions that were open before, on this stream or another."""
    late: int = 0
    """Late steps to report to the server with the next step."""
    refused: dict[int, str] = field(default_factory=dict)
    """Sessions with a part that fits into no message, and the reasons; the core takes them."""
    rejected: list[tuple[Commit, str]] = field(default_factory=list)
    """Commits that fit into no message, and the reasons; the core takes them."""
    _unwritten: dict[int, tuple[Session, bool]] = field(default_factory=dict)
    """Sessions that a message in the outbox opens, and whether they were open before."""
    _opened: dict[int, int] = field(default_factory=dict)
    """By session: the message that opened it last."""
    _sequence: int = 0
    _steps: int = 0

    def __post_init__(self) -> None:
        self._room = Room.of(self.limits, self.server)

    @property
    def queued(self) -> int:
        """How many messages were put into the outbox so far."""
        return self._sequence

    @property
    def settled(self) -> bool:
        """Whether gRPC has taken every message and the server has acknowledged every commit."""
        return self.connected and self.written == self._sequence and not self.commits

    @property
    def owes(self) -> bool:
        """Whether the server still owes an answer."""
        return bool(self.waiting or self.commits)

    # ---- what the client sends -------------------------------------------------------------------------------------

    def wrote(self, sequence: int) -> None:
        """Notes that gRPC has taken a message."""
        self.written = sequence
        if not self.outbox:
            self._unwritten.clear()

    def queue_opens(self, sessions: Iterable[Session], room: int = UNLIMITED) -> None:
        """Puts opens of the sessions that the server does not hold into the outbox.

        Stops when the opens have `room` bytes, or when the stream has no place for another session.
        """
        message = pb.DraftRequest()
        for session in sessions:
            if room > 0 and session.number not in self.held and len(self.held) < self._room.running:
                room -= session.bytes
                self._add_open(message, session, session.length)
        self._queue(message)

    def queue_step(self, batch: StepInput, budget: Budget, now: float, room: int = UNLIMITED) -> int:
        """Puts one step into the outbox. Returns its number, for `awaits`.

        A session that the server does not hold is opened with its tokens before this step, so that the step still
        brings the new ones. The step leaves it out if the stream has no place for it. If all of these sessions
        together need more than `room` bytes, the step leaves them out and notes them in `behind`. New sessions of a
        step that asks for no drafts need no room.
        """
        message = pb.DraftRequest()
        sessions = batch.sessions
        numbers = [s.number for s in sessions]
        starts = list(map(self.held.get, numbers))
        positions, lengths, tokens = batch.before, batch.lengths, batch.tokens
        rows: Sequence[int] = range(len(numbers))
        self.behind = []
        if starts != batch.before:  # some sessions must be opened, or gained tokens while the client sent nothing
            strange = [row for row, start in enumerate(starts) if start is None]
            strange = strange[: max(0, self._room.running - len(self.held))]
            paced = [sessions[row] for row in strange if budget.max_tokens or sessions[row].opened]
            if sum(s.bytes for s in paced) > room:
                self.behind = paced
                strange = [row for row in strange if not (budget.max_tokens or sessions[row].opened)]
            for row in strange:
                self._add_open(message, sessions[row], batch.before[row])
                batch.reopened(row)
            rows = [row for row in rows if numbers[row] in self.held]
            sessions = [sessions[row] for row in rows]
            numbers = [s.number for s in sessions]
            positions = list(map(self.held.__getitem__, numbers))
            new = [s.generated[4 * self.held[s.number] : 4 * s.length] for s in sessions]
            lengths, tokens = [len(text) // 4 for text in new], b"".join(new)
        self.held.update(zip(numbers, [s.length for s in sessions], strict=True))
        self._steps += 1
        if rows:
            step = message.step
            step.sessions = pack(f"<{len(rows)}Q", *numbers)
            step.positions = pack(f"<{len(rows)}i", *positions)
            step.lengths = pack(f"<{len(rows)}i", *lengths)
            step.tokens = tokens
            step.max_tokens, step.verify_cost = budget
            step.late, self.late = self.late, 0
            batch.put_report(step, rows)
        self._queue(message, Awaited(self._steps, rows) if budget.max_tokens else None, now=now)
        return self._steps

    def awaits(self, step: int) -> bool:
        """Returns whether the server still owes an answer to a message of this step."""
        if not self.waiting:
            return False
        return any(awaited.step == step for awaited in self.waiting.values())

    def forget_step(self, step: int) -> int:
        """Stops waiting for this step. Returns how many of its messages the server has not answered."""
        unanswered = [sequence for sequence, awaited in self.waiting.items() if awaited.step == step]
        for sequence in unanswered:
            del self.waiting[sequence]
        return len(unanswered)

    def queue_closes(self, commits: Sequence[Commit], sessions: Iterable[int], now: float) -> list[Commit]:
        """Puts closes into the outbox, with commit and without. Opens sessions to commit that the server does not hold.

        Returns:
            The commits for which the stream has no place now.
        """
        # Sessions that gained tokens while the client sent nothing.
        behind = [c.session for c in commits if self.held.get(c.session.number, c.session.length) < c.session.length]
        if behind:
            self.queue_step(StepInput.held_back(behind), Budget(max_tokens=0), now)
        message = pb.DraftRequest()
        for number in sessions:
            if number in self.held:
                message.closes.add(session=number, generated=self.held[number])
                self._forget(number)
        self._queue(message)
        message, size, batch, left = pb.DraftRequest(), 0, list[Commit](), list[Commit]()
        free = self._room.sessions - len(self.held)
        # The sessions that the server holds come first: their closes free places.
        for commit in sorted(commits, key=lambda c: c.session.number not in self.held):
            session = commit.session
            strange = session.number not in self.held
            need = commit.bytes + 2 * pieces.PART + len(self.namespace)
            if batch and (size + need > self._room.size or len(batch) >= self._room.batch or (strange and free <= 0)):
                self._queue(message, commits=batch, now=now)
                message, size, batch = pb.DraftRequest(), 0, []
                free = self._room.sessions - len(self.held)
            if strange and free <= 0:
                left.append(commit)
                continue
            if strange:
                free -= 1
                self._add_open(message, session, session.length)
            message.closes.add(
                session=session.number,
                commit=True,
                epoch=commit.epoch,
                reward=commit.reward,
                logprobs=commit.logprobs,
                generated=session.length,
                changes=commit.changes,
                alternatives=commit.alternatives,
            )
            self._forget(session.number)
            batch.append(commit)
            size += need
        self._queue(message, commits=batch, now=now)
        return left

    def _add_open(self, message: pb.DraftRequest, session: Session, length: int) -> None:
        message.opens.add(
            session=session.number,
            namespace=self.namespace,
            prompt=session.prompt,
            problem=session.problem,
            generated=bytes(session.generated[: 4 * length]),
            seed=session.seed,
        )
        self._unwritten[session.number] = (session, session.opened)
        self.reopened += session.opened
        session.opened, session.unreported = True, None
        self.held[session.number] = length

    def _queue(
        self,
        message: pb.DraftRequest,
        awaited: Awaited | None = None,
        commits: Sequence[Commit] = (),
        now: float | None = None,
    ) -> None:
        """Puts a message into the outbox, cut into as many messages as it needs."""
        if message.step.max_tokens > self._room.draft:
            message.step.max_tokens = self._room.draft
        parts = [pieces.Piece(message, awaited.rows if awaited else ())]
        if not pieces.fits(message, self._room):
            parts = self._cut(*parts[0], commits)
        finished = {c.session.number: c for c in commits}
        for piece, rows in parts:
            if not (piece.opens or piece.closes or piece.HasField("step")):
                continue
            self._sequence += 1
            piece.sequence = self._sequence
            if awaited and rows:
                self.waiting[self._sequence] = Awaited(awaited.step, rows)
            if done := [finished[c.session] for c in piece.closes if c.session in finished]:
                self.commits[self._sequence] = done
                self.flow.sent(self._sequence, 0, sum(c.bytes for c in done))
            elif piece.opens:
                self.flow.sent(self._sequence, piece.ByteSize(), 0)
            self._opened.update((o.session, self._sequence) for o in piece.opens)
            self.outbox.append(piece)
        if self.heard is None and self.owes:
            self.heard = now

    def _cut(self, message: pb.DraftRequest, rows: Sequence[int], commits: Sequence[Commit]) -> list[pieces.Piece]:
        """Cuts a message into messages that fit, without sessions that fit into none; `rows`: of the awaited step."""
        if misfits := pieces.too_large(message, self._room):
            for opening in message.opens:
                if opening.session in misfits:
                    self._forget(opening.session)
            self.refused |= misfits
            self.rejected += [(c, misfits[c.session.number]) for c in commits if c.session.number in misfits]
            message, stay = pieces.without(message, set(misfits))
            rows = [rows[row] for row in stay] if rows else ()
        return [
            pieces.Piece(piece, [rows[row] for row in mine] if rows else ())
            for piece, mine in pieces.cut(message, self._room)
        ]

    def adopt(self, server: ServerLimits) -> list[Commit]:
        """Takes the limits of a shard that has just connected, and cuts the unwritten messages to fit them.

        Returns:
            Commits taken back, because the stream has no places for all of their sessions at once.
        """
        self.connected = True
        self.server, self._room = server, Room.of(self.limits, server)
        unsaid = list(self.outbox)
        out = self._beyond_capacity(unsaid)
        if not out and all(pieces.fits(m, self._room) and m.step.max_tokens <= self._room.draft for m in unsaid):
            return []
        self.outbox.clear()
        self.flow = Flow()
        self._sequence = unsaid[0].sequence - 1
        said = [(m, self.waiting.pop(m.sequence, None), self.commits.pop(m.sequence, [])) for m in unsaid]
        for message, awaited, commits in said:
            if out:
                message, stay = pieces.without(message, out)
                awaited = awaited and Awaited(awaited.step, [awaited.rows[row] for row in stay])
            self._queue(message, awaited, [c for c in commits if c.session.number not in out])
        return [c for _, _, commits in said for c in commits if c.session.number in out]

    def _beyond_capacity(self, unsaid: Sequence[pb.DraftRequest]) -> set[int]:
        """Returns the sessions in these messages that the stream has no place for."""
        opened = [o.session for m in unsaid for o in m.opens]
        if len(opened) <= self._room.running:
            return set()
        ending = {c.session for m in unsaid for c in m.closes}
        staying = [session for session in opened if session not in ending]
        free = self._room.running - (len(self.held) - len(staying))
        out = ending & set(opened) | set(staying[max(0, free) :])
        for number in out:
            session, before = self._unwritten.pop(number)
            session.opened = before
            self.reopened -= before
            self._forget(number)
        return out

    def _forget(self, session: int) -> None:
        self.held.pop(session, None)
        self._opened.pop(session, None)

    # ---- what the server answers ----------------------------------------------------------------------------------

    def interpret(self, response: pb.DraftResponse, now: float) -> Reply:
        """Takes a response of the server. Returns what it means.

        Raises:
            GarbledReply: the response contradicts itself or what was sent.
        """
        sequence = response.sequence
        if not 0 < sequence <= self._sequence:
            raise GarbledReply(f"sequence: {sequence} was never sent")
        awaited = self.waiting.get(sequence)
        drafts = None if awaited is None else _drafts(response, len(awaited.rows))
        unknown = set(_array("unknown", response.unknown, UINT64).tolist())
        self.waiting.pop(sequence, None)
        commits = self.commits.pop(sequence, [])
        self.flow.answered(sequence)
        self.heard = now if self.owes else None
        if not (unknown or commits or response.refusals):  # fast path for steps
            return Reply(awaited, drafts)
        refused = {r.session: r.reason for r in response.refusals if not r.later}
        later = {r.session: r.reason for r in response.refusals if r.later}
        for number in unknown:
            if self._opened.get(number, sequence + 1) <= sequence:  # not opened again in the meantime
                self._forget(number)
        return Reply(
            awaited=awaited,
            drafts=drafts,
            acknowledged=[c for c in commits if c.session.number not in {*unknown, *refused, *later}],
            postponed=[c for c in commits if c.session.number in later and c.session.number not in unknown],
            why_postponed=next(iter(later.values()), ""),
            unknown=[c for c in commits if c.session.number in unknown],
            turned_down=[c for c in commits if c.session.number in refused and c.session.number not in unknown],
            refused=refused,
        )


def _drafts(response: pb.DraftResponse, sessions: int) -> Drafts:
    lengths = _array("lengths", response.lengths, INT32).tolist()
    tokens = _array("tokens", response.tokens, INT32)
    probs = _array("probs", response.probs, FLOAT32)
    if len(lengths) != sessions:
        raise GarbledReply(f"lengths: {len(lengths)} drafts for {sessions} sessions")
    offsets = list(accumulate(lengths, initial=0))
    if min(lengths, default=0) < 0 or offsets[-1] != len(tokens) or len(probs) != len(tokens):
        raise GarbledReply(f"lengths: they do not add up to {len(tokens)} tokens and {len(probs)} probabilities")
    if len(tokens) and np.minimum.reduce(tokens) < 0:
        raise GarbledReply(f"tokens: {tokens.min()} is negative")
    return Drafts(offsets, tokens, probs)


def _array(name: str, data: bytes, dtype: np.dtype) -> NDArray:  # type: ignore[type-arg]
    if len(data) % dtype.itemsize:
        raise GarbledReply(f"{name}: {len(data)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(data, dtype)
