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

from histospec.client.config import Limits
from histospec.client.core import pieces
from histospec.client.core.budget import Budget, StepInput
from histospec.client.core.pace import Flow
from histospec.client.core.room import UNLIMITED, Room, ServerLimits
from histospec.client.core.session import Commit, Session
from histospec.protocol.arrays import FLOAT32, INT32, UINT64
from histospec.v1 import draft_pb2 as pb


class GarbledReply(Exception):  # noqa: N818 - what it is
    """A response that does not add up; nothing after it can be trusted."""


class Drafts(NamedTuple):
    """The drafts of one reply, flat."""

    offsets: list[int]
    """[B + 1]"""
    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]


class Awaited(NamedTuple):
    """What a message owes to a step whose drafts the caller waits for."""

    step: int
    rows: Sequence[int]
    """Of that step."""


class Reply(NamedTuple):
    """What one response meant."""

    awaited: Awaited | None
    """None where the message had no step, or where the caller has stopped waiting."""
    drafts: Drafts | None
    """One for each of the rows."""
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
    server: ServerLimits = field(default_factory=ServerLimits)
    """What the shard takes, as far as it is known."""
    outbox: deque[pb.DraftRequest] = field(default_factory=deque)
    waiting: dict[int, Awaited] = field(default_factory=dict)
    """By sequence: what the caller waits for. A large step has several messages."""
    commits: dict[int, list[Commit]] = field(default_factory=dict)
    """By sequence: commits that are not acknowledged."""
    held: dict[int, int] = field(default_factory=dict)
    """By session: how many generated tokens the server has."""
    flow: Flow = field(default_factory=Flow)
    """What is on its way."""
    connected: bool = False
    """Whether the shard has answered on this stream's connection; nothing is written before."""
    behind: list[Session] = field(default_factory=list)
    """Sessions that the last step left out, which are to be opened behind it."""
    heard: float | None = None
    """When the stream last said something; None until it owes an answer."""
    written: int = 0
    """The last message that gRPC has taken."""
    reopened: int = 0
    """Sessions that were open before, on this stream or another."""
    late: int = 0
    """Steps whose drafts came too late, which the server is to hear of with the next step."""
    refused: dict[int, str] = field(default_factory=dict)
    """Sessions of which a part fits into no message, and why; the core takes them."""
    rejected: list[tuple[Commit, str]] = field(default_factory=list)
    """Commits that fit into no message, and why; the core takes them."""
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
        """Messages that were put into the outbox so far."""
        return self._sequence

    @property
    def settled(self) -> bool:
        """Whether everything is written and every commit acknowledged."""
        return self.connected and self.written == self._sequence and not self.commits

    @property
    def owes(self) -> bool:
        """Whether the server has still to answer something."""
        return bool(self.waiting or self.commits)

    # ---- what the client sends -------------------------------------------------------------------------------------

    def wrote(self, sequence: int) -> None:
        """gRPC has taken a message."""
        self.written = sequence
        if not self.outbox:
            self._unwritten.clear()

    def queue_opens(self, sessions: Iterable[Session], room: int = UNLIMITED) -> None:
        """Puts opens into the outbox, until they have `room` bytes: of what the server does not hold, while the stream
        has places.
        """
        message = pb.DraftRequest()
        for session in sessions:
            if room > 0 and session.number not in self.held and len(self.held) < self._room.running:
                room -= session.bytes
                self._add_open(message, session, session.length)
        self._queue(message)

    def queue_step(self, batch: StepInput, budget: Budget, now: float, room: int = UNLIMITED) -> int:
        """Puts one step into the outbox. -> its number, see `awaits`.

        A session that the server does not hold is opened with what it had before, so that its step is still a step.
        Where the stream has no place for it, it is left out. Where all of them take more than `room` bytes, they are
        left out and noted in `behind`; new sessions of a step that asks for no drafts need no room.
        """
        message = pb.DraftRequest()
        sessions = batch.sessions
        numbers = [s.number for s in sessions]
        starts = list(map(self.held.get, numbers))
        positions, lengths, tokens = batch.before, batch.lengths, batch.tokens
        rows: Sequence[int] = range(len(numbers))
        self.behind = []
        if starts != batch.before:  # some are to be opened, or gained tokens while nothing was sent
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
            step.sessions = np.array(numbers, UINT64).tobytes()
            step.positions = np.array(positions, INT32).tobytes()
            step.lengths = np.array(lengths, INT32).tobytes()
            step.tokens = tokens
            step.max_tokens, step.verify_cost = budget
            step.late, self.late = self.late, 0
            batch.put_report(step, rows)
        self._queue(message, Awaited(self._steps, rows) if budget.max_tokens else None, now=now)
        return self._steps

    def awaits(self, step: int) -> bool:
        """Whether a message of this step is to be answered."""
        return any(awaited.step == step for awaited in self.waiting.values())

    def forget_step(self, step: int) -> int:
        """The caller waits for this step no longer. -> its messages that were not answered."""
        unanswered = [sequence for sequence, awaited in self.waiting.items() if awaited.step == step]
        for sequence in unanswered:
            del self.waiting[sequence]
        return len(unanswered)

    def queue_closes(self, commits: Sequence[Commit], sessions: Iterable[int], now: float) -> list[Commit]:
        """Puts closes into the outbox: with commit (opening first what the server does not hold), and without.

        Returns:
            The commits for which the stream has no place now.
        """
        # They gained tokens while nothing was sent.
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
        # Those that the server holds come first: they make places.
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
        """Puts a message into the outbox, in as many pieces as it needs."""
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
        """The same in messages that fit, without the sessions that fit into none; `rows`: of the awaited step."""
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
        """The shard is connected and its limits are known: cuts what is not written yet, so that it fits.

        Returns:
            Commits that were taken back, because the stream has no places for all of their sessions at a time.
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
        """Sessions in these messages that the stream has no place for."""
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
        """Takes a response of the server; returns what it means.

        Raises:
            GarbledReply: it does not add up.
        """
        sequence = response.sequence
        if not 0 < sequence <= self._sequence:
            raise GarbledReply(f"sequence: {sequence} was never sent")
        awaited = self.waiting.get(sequence)
        drafts = None if awaited is None else _drafts(response, len(awaited.rows))
        unknown = set(_array("unknown", response.unknown, UINT64).tolist())
        refused = {r.session: r.reason for r in response.refusals if not r.later}
        later = {r.session: r.reason for r in response.refusals if r.later}
        self.waiting.pop(sequence, None)
        commits = self.commits.pop(sequence, [])
        self.flow.answered(sequence)
        self.heard = now if self.owes else None
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
