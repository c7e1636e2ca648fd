"""One Draft stream as the client sees it: what the server holds, and what it still owes. Does no I/O.

The state lives as long as its stream. The state of the next stream starts empty, so it opens every session again.
Messages enter `outbox` in the order of their sequence; the owner of the stream writes them in that order.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import pack

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from histospec.client.config import Limits
from histospec.client.core import message_limits
from histospec.client.core.commits import Commit
from histospec.client.core.message_limits import PART, UNLIMITED, MessageLimits, Piece, ServerLimits
from histospec.client.core.recovery import InFlight
from histospec.client.core.reply import Awaited, Reply, continued_in
from histospec.client.core.session import Session
from histospec.client.core.step import Budget, Drafts, GarbledReply, Part, StepInput, array
from histospec.protocol.arrays import UINT64
from histospec.v1 import draft_pb2 as pb

LATE_ANSWERS = 8
"""Of so many late messages, the newest, the client still takes the drafts."""

PARTS = 3
"""A message names a session at most so often: it may open, step and close it."""


@dataclass
class StreamState:
    """The state of one stream."""

    namespace: str
    own_limits: Limits
    server_limits: ServerLimits = field(default_factory=ServerLimits)
    """What the shard accepts, as far as the client knows."""
    outbox: deque[pb.DraftRequest] = field(default_factory=deque)
    waiting: dict[int, Awaited] = field(default_factory=dict)
    """By sequence: the drafts that the caller waits for."""
    overdue: dict[int, Awaited] = field(default_factory=dict)
    """By sequence: drafts that the caller has stopped waiting for; those that arrive are still added to their step."""
    commits: dict[int, list[Commit]] = field(default_factory=dict)
    """By sequence: commits that the server has not acknowledged."""
    aborts: set[int] = field(default_factory=set)
    """The messages with aborted responses that the server has not answered yet."""
    server_has: dict[int, int] = field(default_factory=dict)
    """By session: how many generated tokens the server has."""
    in_flight: InFlight = field(default_factory=InFlight)
    connected: bool = False
    """Whether the shard has answered on this stream's connection; the client writes nothing before."""
    left_out: list[Session] = field(default_factory=list)
    """Sessions that the last step left out; the client opens them after it."""
    heard: float | None = None
    """When the last answer arrived, or the client began to wait for one; None while the server owes no answer."""
    written: int = 0
    """The last message that gRPC has taken."""
    queued: int = 0
    """How many messages were put into the outbox so far: the sequence of the last one."""
    answers: int = 0
    """How many answers have arrived."""
    longest: int = 1 << 16
    """The most bytes that an answer to a message of this stream may have."""
    newest: int = 0
    """The largest number of a session that a message opened."""
    reopened: int = 0
    """Sessions that were open before, on this stream or another."""
    rehearsal: int = 0
    """The message with an empty step that the server has not answered yet; 0: none."""
    late: int = 0
    """Late steps to report to the server with the next step."""
    refused: dict[int, str] = field(default_factory=dict)
    """Sessions with a part that fits into no message, and the reasons; the shard takes them."""
    rejected: list[tuple[Commit, str]] = field(default_factory=list)
    """Commits that fit into no message, and the reasons; the shard takes them."""
    _unwritten: dict[int, tuple[Session, bool]] = field(default_factory=dict)
    """Sessions that a message in the outbox opens, and whether they were open before."""
    _opened: dict[int, int] = field(default_factory=dict)
    """By session: the message that opened it last."""

    def __post_init__(self) -> None:
        self._limits = MessageLimits.of(self.own_limits, self.server_limits)

    @property
    def settled(self) -> bool:
        """Whether gRPC has taken every message, and the server has acknowledged every commit and every abort."""
        return self.connected and self.written == self.queued and not (self.commits or self.aborts)

    @property
    def owes(self) -> bool:
        """Whether the server still owes an answer."""
        return bool(self.waiting or self.commits or self.aborts)

    @property
    def may_rehearse(self) -> bool:
        """Whether nothing is in flight that an empty step could delay."""
        return self.connected and not (self.outbox or self.owes or self.rehearsal)

    # ---- what the client sends -------------------------------------------------------------------------------------

    def wrote(self, sequence: int) -> None:
        """Notes that gRPC has taken a message."""
        self.written = sequence
        if not self.outbox:
            self._unwritten.clear()

    def lose(self) -> list[Commit]:
        """Ends the waits for this stream, which has ended. Returns the commits that were not acknowledged."""
        for awaited in self.waiting.values():
            awaited.part.done = True
        return [commit for batch in self.commits.values() for commit in batch]

    def take_oldest(self) -> Commit:
        """Removes and returns the commit that was sent first; it may still be stored."""
        sequence, batch = next(iter(self.commits.items()))
        if len(batch) == 1:
            del self.commits[sequence]
        return batch.pop(0)

    def queue_opens(self, sessions: Iterable[Session], capacity: int = UNLIMITED) -> None:
        """Puts opens of the sessions that the server does not hold into the outbox.

        Stops when the opens have `capacity` bytes, or when the stream has no place for another session.
        """
        message = pb.DraftRequest()
        for session in sessions:
            if capacity > 0 and session.number not in self.server_has and len(self.server_has) < self._limits.running:
                capacity -= session.bytes
                self._add_open(message, session, session.length)
        self._queue(message)

    def queue_step(
        self, batch: StepInput, budget: Budget, now: float, capacity: int = UNLIMITED, part: Part | None = None
    ) -> None:
        """Puts one step into the outbox. `part` waits for its drafts.

        A session that the server does not hold is opened with its tokens before this step, so that the step still
        brings the new ones. The step leaves it out if the stream has no place for it. If all of these sessions
        together need more than `capacity` bytes, the step leaves them out and notes them in `left_out`. New sessions of
        a step that asks for no drafts need no capacity.
        """
        message = pb.DraftRequest()
        sessions = batch.sessions
        numbers = [s.number for s in sessions]
        starts = list(map(self.server_has.get, numbers))
        positions, lengths, tokens = batch.before, batch.lengths, batch.tokens
        rows: Sequence[int] = range(len(numbers))
        self.left_out = []
        if starts != batch.before:  # some sessions must be opened, or gained tokens while the client sent nothing
            unopened = [row for row, start in enumerate(starts) if start is None]
            unopened = unopened[: max(0, self._limits.running - len(self.server_has))]
            paced = [sessions[row] for row in unopened if budget.max_tokens or sessions[row].opened]
            if sum(s.bytes for s in paced) > capacity:
                self.left_out = paced
                unopened = [row for row in unopened if not (budget.max_tokens or sessions[row].opened)]
            for row in unopened:
                self._add_open(message, sessions[row], batch.before[row])
                batch.clear_verified(row)
            rows = [row for row in rows if numbers[row] in self.server_has]
            sessions = [sessions[row] for row in rows]
            numbers = [s.number for s in sessions]
            positions = list(map(self.server_has.__getitem__, numbers))
            new = [s.generated[4 * self.server_has[s.number] : 4 * s.length] for s in sessions]
            lengths, tokens = [len(text) // 4 for text in new], b"".join(new)
        self.server_has.update(zip(numbers, [s.length for s in sessions], strict=True))
        if rows:
            step = message.step
            step.sessions = pack(f"<{len(rows)}Q", *numbers)
            step.positions = pack(f"<{len(rows)}i", *positions)
            step.lengths = pack(f"<{len(rows)}i", *lengths)
            step.tokens = tokens
            step.max_tokens, step.verify_cost, step.runners_up = budget
            step.late, self.late = self.late, 0
            batch.put_report(step, rows)
        self._queue(message, Awaited(part, rows) if part else None, now=now)

    def queue_rehearsal(self) -> None:
        """Puts a step without sessions into the outbox. The server answers it, and changes nothing."""
        message = pb.DraftRequest()
        message.step.SetInParent()
        self._queue(message)
        self.rehearsal = self.queued

    def awaits(self, part: Part) -> bool:
        """Returns whether the server still owes an answer to a message of this part."""
        return any(awaited.part is part for awaited in self.waiting.values())

    def give_up(self, part: Part) -> int:
        """Stops waiting for this part. Returns how many of its messages the server has not answered."""
        part.done = True
        unanswered = [sequence for sequence, awaited in self.waiting.items() if awaited.part is part]
        for sequence in unanswered:
            self.overdue[sequence] = self.waiting.pop(sequence)
        while len(self.overdue) > LATE_ANSWERS:
            del self.overdue[next(iter(self.overdue))]
        return len(unanswered)

    def queue_closes(
        self, commits: Sequence[Commit], sessions: Mapping[int, pb.AbortedResponse | None], now: float
    ) -> list[Commit]:
        """Puts closes into the outbox, with commit and without. Opens sessions to commit that the server does not hold.

        Args:
            commits: the responses to commit.
            sessions: those to close without, and for the aborted ones what may be continued.
            now: the time.

        Returns:
            The commits for which the stream has no place now.
        """
        # Sessions that gained tokens while the client sent nothing.
        behind = [
            c.session for c in commits if self.server_has.get(c.session.number, c.session.length) < c.session.length
        ]
        if behind:
            self.queue_step(StepInput.catching_up(behind), Budget(max_tokens=0), now)
        message = pb.DraftRequest()
        for number, aborted in sessions.items():
            if aborted is not None or number in self.server_has:
                message.closes.add(session=number, generated=self.server_has.get(number, 0), aborted=aborted)
                self._forget(number)
        self._queue(message, now=now)
        message, size, batch, left = pb.DraftRequest(), 0, list[Commit](), list[Commit]()
        free = self._limits.sessions - len(self.server_has)
        # The sessions that the server holds come first: their closes free places.
        for commit in sorted(commits, key=lambda c: c.session.number not in self.server_has):
            session = commit.session
            unopened = session.number not in self.server_has
            need = commit.bytes + 2 * PART + len(self.namespace)
            if batch and (
                size + need > self._limits.size or len(batch) >= self._limits.batch or (unopened and free <= 0)
            ):
                self._queue(message, commits=batch, now=now)
                message, size, batch = pb.DraftRequest(), 0, []
                free = self._limits.sessions - len(self.server_has)
            if unopened and free <= 0:
                left.append(commit)
                continue
            if unopened:
                free -= 1
                self._add_open(message, session, session.length)
            message.closes.append(commit.message())
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
            position_noise=session.position_noise,
        )
        self._unwritten[session.number] = (session, session.opened)
        self.reopened += session.opened
        session.opened, session.unreported = True, None
        self.server_has[session.number] = length
        self.newest = max(self.newest, session.number)

    def _queue(
        self,
        message: pb.DraftRequest,
        awaited: Awaited | None = None,
        commits: Sequence[Commit] = (),
        now: float | None = None,
    ) -> None:
        """Puts a message into the outbox, cut into as many messages as it needs."""
        if message.step.max_tokens > self._limits.draft:
            message.step.max_tokens = self._limits.draft
        parts = [Piece(message, awaited.rows if awaited else ())]
        if not message_limits.fits(message, self._limits):
            parts = self._cut(*parts[0], commits)
        finished = {c.session.number: c for c in commits}
        for piece, rows in parts:
            opens, closes = piece.opens, piece.closes
            if not (opens or closes or piece.HasField("step")):
                continue
            self.queued += 1
            piece.sequence = self.queued
            self.longest = max(self.longest, message_limits.longest_answer(piece))
            if awaited and rows:
                self.waiting[self.queued] = Awaited(awaited.part, rows, piece.step.max_tokens)
            if done := [finished[c.session] for c in closes if c.session in finished]:
                self.commits[self.queued] = done
                self.in_flight.sent(self.queued, 0, sum(c.bytes for c in done))
            elif opens:
                self.in_flight.sent(self.queued, piece.ByteSize(), 0)
            if any(close.HasField("aborted") for close in closes):
                self.aborts.add(self.queued)
            if opens:
                self._opened.update((o.session, self.queued) for o in opens)
            self.outbox.append(piece)
        if self.heard is None and self.owes:
            self.heard = now

    def _cut(self, message: pb.DraftRequest, rows: Sequence[int], commits: Sequence[Commit]) -> list[Piece]:
        """Cuts a message into messages that fit, without sessions that fit into none; `rows`: of the awaited step."""
        if oversized := message_limits.too_large(message, self._limits):
            for opening in message.opens:
                if opening.session in oversized:
                    self._forget(opening.session)
            self.refused |= oversized
            self.rejected += [(c, oversized[c.session.number]) for c in commits if c.session.number in oversized]
            message, stay = message_limits.without(message, set(oversized))
            rows = [rows[row] for row in stay] if rows else ()
        return [
            Piece(piece, [rows[row] for row in mine] if rows else ())
            for piece, mine in message_limits.cut(message, self._limits)
        ]

    def adopt(self, server: ServerLimits) -> list[Commit]:
        """Takes the limits of a shard that has just connected, and cuts the unwritten messages to fit them.

        Returns:
            Commits taken back, because the stream has no places for all of their sessions at once.
        """
        self.connected = True
        self.server_limits, self._limits = server, MessageLimits.of(self.own_limits, server)
        unwritten = list(self.outbox)
        out = self._beyond_limit(unwritten)
        if not out and all(
            message_limits.fits(m, self._limits) and m.step.max_tokens <= self._limits.draft for m in unwritten
        ):
            return []
        self.outbox.clear()
        self.in_flight = InFlight()
        self.queued = unwritten[0].sequence - 1
        messages = [(m, self.waiting.pop(m.sequence, None), self.commits.pop(m.sequence, [])) for m in unwritten]
        for message, awaited, commits in messages:
            if out:
                message, stay = message_limits.without(message, out)
                awaited = awaited and Awaited(awaited.part, [awaited.rows[row] for row in stay])
            self._queue(message, awaited, [c for c in commits if c.session.number not in out])
        for _, awaited, _ in messages:
            if awaited and not self.awaits(awaited.part):
                awaited.part.done = True
        return [c for _, _, commits in messages for c in commits if c.session.number in out]

    def _beyond_limit(self, unwritten: Sequence[pb.DraftRequest]) -> set[int]:
        """Returns the sessions in these messages that the stream has no place for."""
        opened = [o.session for m in unwritten for o in m.opens]
        if len(opened) <= self._limits.running:
            return set()
        ending = {c.session for m in unwritten for c in m.closes}
        staying = [session for session in opened if session not in ending]
        free = self._limits.running - (len(self.server_has) - len(staying))
        out = ending & set(opened) | set(staying[max(0, free) :])
        for number in out:
            session, before = self._unwritten.pop(number)
            session.opened = before
            self.reopened -= before
            self._forget(number)
        return out

    def _forget(self, session: int) -> None:
        self.server_has.pop(session, None)
        self._opened.pop(session, None)

    # ---- what the server answers ----------------------------------------------------------------------------------

    def parse(self, text: bytes) -> pb.DraftResponse:
        """Returns a response, from its bytes. Raises GarbledReply if no message of this stream can have it."""
        if len(text) > self.longest:
            raise GarbledReply(f"{len(text)} bytes, more than the {self.longest} of an answer to what was asked")
        try:
            return pb.DraftResponse.FromString(text)
        except DecodeError:
            raise GarbledReply("it cannot be parsed") from None

    def interpret(self, response: pb.DraftResponse, now: float) -> Reply:
        """Takes a response of the server. Returns what it means.

        Raises:
            GarbledReply: the response contradicts itself or what was sent.
        """
        sequence = response.sequence
        if not 0 < sequence <= self.queued:
            raise GarbledReply(f"sequence: {sequence} was never sent")
        self.answers += 1
        if self.answers > self.queued:
            raise GarbledReply(f"sequence: {self.answers} answers to {self.queued} messages")
        if sequence == self.rehearsal:
            self.rehearsal = 0
        self.aborts.discard(sequence)
        drafts = part = None
        if (awaited := self.waiting.get(sequence)) is not None:
            drafts = Drafts.parse(response, len(awaited.rows), awaited.most)
        elif (overdue := self.overdue.pop(sequence, None)) is not None:
            late = Drafts.parse(response, len(overdue.rows), overdue.most)
            overdue.part.drafts.append((overdue.rows, late))
        unknown = self._named("unknown", array("unknown", response.unknown, UINT64)) if response.unknown else set()
        if response.refusals:
            self._named("refusals", [r.session for r in response.refusals[: PARTS * self._limits.batch + 1]])
        if awaited is not None and drafts is not None:
            del self.waiting[sequence]
            awaited.part.drafts.append((awaited.rows, drafts))
            if not self.awaits(awaited.part):
                part = awaited.part
                part.done = True
        commits = self.commits.pop(sequence, [])
        if response.too_old > len(commits):
            raise GarbledReply(f"too_old: {response.too_old} of {len(commits)} commits")
        self.in_flight.answered(sequence)
        self.heard = now if self.owes else None
        if not (unknown or commits or response.refusals or response.continued):  # fast path for steps
            return Reply(part, drafts)
        continued = continued_in(response)
        self._named("continued", list(continued))
        reply = Reply.of(response, commits, unknown, continued, part, drafts)
        for number in unknown | continued.keys():
            if self._opened.get(number, sequence + 1) <= sequence:  # not opened again in the meantime
                self._forget(number)
        for number in reply.refused:
            self.server_has.pop(number, None)
        return reply

    def _named(self, field: str, sessions: "Sequence[int] | NDArray[np.uint64]") -> set[int]:
        """Returns the sessions that a field of a response names. Raises GarbledReply if no message can name them."""
        most = PARTS * self._limits.batch
        if len(sessions) > most:
            raise GarbledReply(f"{field}: {len(sessions)} sessions, a message has at most {most}")
        numbers = {int(number) for number in sessions}
        if numbers and not 0 < max(numbers) <= self.newest:
            raise GarbledReply(f"{field}: session {max(numbers)} was never opened")
        return numbers
