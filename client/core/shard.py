"""A shard as the client knows it: its stream, the responses that wait for it, and what the client makes of its answers.

Belongs to the core, which locks. A shard does no I/O: it leaves messages in the outbox of its stream's state, and a
`Stream` of the transport writes them.
"""

import logging
from collections.abc import Mapping, Sequence

import grpc

from histospec.client.config import Endpoint
from histospec.client.core.commits import Commit
from histospec.client.core.message_limits import UNLIMITED, ServerLimits
from histospec.client.core.outage_log import Contact
from histospec.client.core.recovery import CircuitBreaker, SendWindow
from histospec.client.core.reply import Reply
from histospec.client.core.session import Session
from histospec.client.core.shared import Shared
from histospec.client.core.step import Budget, GarbledReply, Part, Pending, StepInput
from histospec.client.core.stream_state import StreamState
from histospec.protocol.aborted import LIMIT
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")

CLOSED_HERE = "closed by the client"
"""Details of the end of a stream that the client closed."""
_POISON = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Shard:
    """One shard. Without an address it stands for the shards that are still to be found."""

    def __init__(self, endpoint: Endpoint, shared: Shared) -> None:
        self.endpoint = endpoint
        self.left = False
        """Whether it is no longer a member."""
        self.contact = Contact()
        self.limits = ServerLimits()
        """What it accepts, as far as the client knows."""
        self.breaker = CircuitBreaker(shared.config.breaker)
        self._deadline = deadline = shared.config.timeouts.step
        self.opening = SendWindow(deadline, soon=deadline / 2, growth=0.5)
        self.committing = SendWindow(deadline, soon=deadline / 4, growth=0.125)
        """How many bytes of opens, and of commits that waited for the shard, may be ahead of a step."""
        self.stream: StreamState | None = None
        self.queue = shared.commits.queue(endpoint.name)
        self.queue.member, self.queue.drop_oldest = True, self._drop_oldest
        self._shared = shared
        # Sessions to close without a commit, and for the aborted ones, also those of other shards, what may go on.
        self._closes: dict[int, pb.AbortedResponse | None] = {}
        self._opens: dict[int, Session] = {}  # sessions without a step so far; a flush opens them

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return self.endpoint.name

    @property
    def where(self) -> str:
        """Its name and address, for messages."""
        name, address = self.endpoint.name, self.endpoint.address
        return f"{name} at {address}" if address not in ("", name) else name

    @property
    def state(self) -> str:
        """The state of its breaker; "open" while it is still to be found."""
        return self.breaker.state if self.endpoint.address else "open"

    @property
    def settled(self) -> bool:
        """Whether it has all messages and has acknowledged every commit and abort, or is lost."""
        if not (self.endpoint.address or self.left):
            return False
        return self.stream is None or self.stream.settled

    # ---- to the shard ---------------------------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """Opens a session with its first step, or with a flush."""
        self._opens[session.number] = session

    def forget(self, session: Session) -> None:
        """Closes a session that has ended without a commit, or that has moved to another shard."""
        self._opens.pop(session.number, None)
        if self.stream and session.number in self.stream.server_has:
            self._closes.setdefault(session.number, None)

    def abort(self, session: Session, aborted: pb.AbortedResponse) -> None:
        """Notes that a session of this or another shard was aborted: this one may own the prompt that continues it."""
        self._opens.pop(session.number, None)
        self._closes[session.number] = aborted
        if len(self._closes) > LIMIT:  # the shard is away
            del self._closes[next(iter(self._closes))]

    def commit(self, commit: Commit) -> None:
        """Ends a session, and keeps its response until the shard acknowledges it."""
        if commit.session.refused:
            self.forget(commit.session)
            self._shared.commits.refuse(self.queue, commit, "its session was refused")
        else:
            self._opens.pop(commit.session.number, None)
            self._shared.commits.keep(self.queue, commit)

    def ask(self, mine: StepInput, rows: Sequence[int], budget: Budget, now: float, pending: Pending) -> None:
        """Leaves a message with its part of a step, and notes in `pending` what the caller has to wait for.

        `rows`: those of its sessions in the caller's step.
        """
        stats = self._shared.stats
        stats.steps += 1
        self.contact.asked += budget.max_tokens > 0
        if not self._may_ask(now):
            stats.skipped += 1
            mine.postpone_report()
            if self.contact.remind(now):
                self._shared.explain_later(self)
            if self._is_sought:
                pending.touched.append(self)
            return
        stream = self._begin_stream()
        if budget.max_tokens > self.limits.draft and self.contact.cuts(budget.max_tokens, self.limits.draft):
            line = "HistoSpec: %s drafts at most %d tokens (--max-draft-tokens), and %d are asked for; drafts are cut"
            self._shared.warn(line, self.name, self.limits.draft, budget.max_tokens)
        if self._opens:
            for session in mine.sessions:
                self._opens.pop(session.number, None)
        in_flight = stream.in_flight
        part = Part(rows, now) if budget.max_tokens else None
        stream.queue_step(mine, budget, now, self.opening.size - in_flight.opens, part)
        if part is not None and stream.awaits(part):
            part.opens, part.commits = in_flight.opens, in_flight.commits
            pending.parts.append((self, part))
        # The caller waits for the step's drafts, so the rest follows it: first sessions to draft again, then commits.
        capacity = self.committing.size - in_flight.commits
        if stream.left_out:
            # If the server owes no answer, none will report what it has applied.
            stream.queue_opens(stream.left_out, self.opening.size - in_flight.opens * stream.owes)
            capacity = 0
        self._send_commits(stream, now, capacity)
        pending.touched.append(self)

    def rehearse(self) -> bool:
        """Leaves an empty step, if the shard is healthy and owes no answer. Returns whether it did."""
        stream = self.stream
        if self._shared.closed or self.breaker.state != "closed" or stream is None or not stream.may_rehearse:
            return False
        stream.queue_rehearsal()
        return True

    def flush(self, now: float) -> bool:
        """Leaves a message with the opens and closes that wait. Returns whether there is anything to write or wait for.

        This is also the case if the shard is still to be found, or if it is healthy and owes an acknowledgement.
        """
        if not (self._opens or self._closes or self.queue.due(now)):
            return not self.settled and self.breaker.state == "closed"
        if not self._may_ask(now):
            return self._is_sought
        stream = self._begin_stream()
        queued = stream.queued
        self._send_commits(stream, now)
        stream.queue_opens(self._opens.values())
        self._opens.clear()
        self._give_up_oversized(stream, now)
        return stream.queued > queued or not self.settled  # else the stream has no place for more

    def late(self, part: Part, now: float) -> None:
        """Counts this part as late: its drafts did not arrive in time."""
        stream = self.stream
        if stream is None:  # the end of a stream ends the waits for it, but not if an interrupt came in between
            part.done = True
            return
        self._shared.stats.late += 1
        self.opening.late(part.opens)
        self.committing.late(part.commits)
        silent = self._is_silent(now)
        self.breaker.failure(now, soon=silent or bool(stream.left_out) or part.commits > 0)
        stream.late += stream.give_up(part)
        if self.breaker.state == "open" and (line := self.contact.first_unanswered(self.where, self._deadline)):
            self._shared.warn("%s", line)
        if silent:
            silence = f"no answer for {self._shared.config.timeouts.silence:g} s, reconnecting"
            self.unreachable(grpc.StatusCode.DEADLINE_EXCEEDED, silence, now)
            self.lose_stream()

    def overdue(self, now: float) -> None:
        """Notes that a flush waited in vain."""
        if self.stream and self.stream.commits and self.breaker.state != "closed":
            self.breaker.failure(now)

    def lose_if_silent(self, now: float) -> None:
        """Gives the stream up if the shard has fallen silent. Without steps, no late draft would show this."""
        if self._is_silent(now):
            self.lose_stream()

    def lose_stream(self) -> None:
        """Forgets the stream, if there is one: ends the waits for it, and puts its commits back to be sent again."""
        again = self._forget_stream()
        self.queue.forget_fresh()
        self._shared.commits.unsent(again)

    def renew(self) -> None:
        """Forgets its stream and the sessions to open, after an interrupt; the core names those anew."""
        self._forget_stream()
        self._opens.clear()

    def _forget_stream(self) -> list[Commit]:
        """Ends the waits for its stream, if there is one. Returns the commits that it has not acknowledged."""
        stream, self.stream = self.stream, None
        # Sessions end with their stream; aborted responses may go on.
        self._closes = {number: aborted for number, aborted in self._closes.items() if aborted is not None}
        if stream is None:
            return []
        again = stream.lose()
        self._shared.stats.reopened += stream.reopened
        self.opening.reset()
        self.committing.reset()
        return again

    def _begin_stream(self) -> StreamState:
        if self.stream is None:
            config = self._shared.config
            self.stream = StreamState(config.namespace, config.limits, self.limits)
        return self.stream

    def _send_commits(self, stream: StreamState, now: float, capacity: int = UNLIMITED) -> None:
        """Leaves closes and the oldest commits. A full message that is not acknowledged yet holds up further ones."""
        if not (self.queue.waiting or self._closes):
            self.queue.forget_fresh()
        else:
            most = self._shared.config.limits.message_bytes - stream.in_flight.unacknowledged
            batch = self.queue.take(now, capacity, most)
            if batch or self._closes:
                left = stream.queue_closes(batch, self._closes, now)
                self._closes = {}
                self.queue.waiting.extendleft(reversed(left))
        self._give_up_oversized(stream, now)

    def _give_up_oversized(self, stream: StreamState, now: float) -> None:
        """Gives up sessions and commits with a part that is too large for any message."""
        for commit, reason in stream.rejected:
            self._shared.commits.drop(commit, reason)
        stream.rejected.clear()
        refused, stream.refused = stream.refused, {}
        if refused:
            self._closes |= {number: None for number in refused if number in stream.server_has}
            self._refuse(refused, now)

    def _drop_oldest(self) -> Commit:
        if self.queue.waiting:
            oldest = self.queue.waiting.popleft()
        else:
            assert self.stream is not None
            oldest = self.stream.take_oldest()
        self.forget(oldest.session)
        return oldest

    # ---- from the shard -------------------------------------------------------------------------------------------

    def reply(self, stream: StreamState, response: pb.DraftResponse, now: float) -> None:
        """Takes a response that has arrived on its stream.

        Raises:
            GarbledReply: the response contradicts itself or what was sent.
        """
        reply = stream.interpret(response, now)
        if reply.continued:
            self._resume(reply)
        stats, commits = self._shared.stats, self._shared.commits
        if not self.contact.answers:
            line = self.contact.reached(self.where, self._shared.config.namespace, now)
            if line is not None:
                self._shared.inform("%s", line)
        if reply.drafts is not None:
            stats.drafts += reply.drafts.nonempty
            stats.draft_tokens += len(reply.drafts.tokens)
        if (part := reply.part) is not None:
            self.contact.in_time = True
            self.breaker.success()
            self.opening.answered(now - part.begun, part.opens, bool(stream.left_out))
            self.committing.answered(now - part.begun, part.commits, bool(self.queue.waiting))
        elif reply.acknowledged and reply.drafts is None and self.breaker.state == "trying":
            self.breaker.success()
        commits.acknowledged(self.queue, reply.acknowledged)
        if reply.too_old:
            self.too_old(reply.too_old, now)
        for commit in reply.turned_down:
            commits.drop(commit, reply.refused[commit.session.number])
        if reply.postponed:
            self.queue.pause(reply.why_postponed, now)
            commits.unsent(reply.postponed)
        commits.again(reply.unknown)
        if reply.refused:
            self._refuse(reply.refused, now)

    def _resume(self, reply: Reply) -> None:
        """Lets sessions, and responses on their way, continue aborted ones at the shards that own their problems."""
        for number, prompt in reply.continued.items():
            session = self._shared.sessions.get(number) or self._shared.commits.session(number)
            if session is None or prompt * 4 == len(session.prompt):
                continue  # it has ended, or an earlier answer said so
            if not 0 < prompt * 4 < len(session.prompt):
                raise GarbledReply(f"prompts: {prompt} of the {len(session.prompt) // 4} tokens of a prompt")
            session.resume(prompt)
            if number in self._shared.sessions:
                self._shared.move(session)
        self._shared.commits.move()

    def too_old(self, responses: int, now: float) -> None:
        """Counts responses that the shard did not keep, because it keeps newer epochs of their problem."""
        stats = self._shared.stats
        stats.too_old += responses
        if self.contact.too_old(now):
            line = (
                "HistoSpec: %s did not keep responses (%d so far): it keeps newer epochs of their problems "
                "(--history-epochs). If newer epochs are wrong, or the run went back, call rewind(epoch)"
            )
            self._shared.warn(line, self.name, stats.too_old)

    def connected(self, stream: StreamState, limits: ServerLimits, now: float) -> None:
        """Takes the limits of a shard that has just connected, before anything is written."""
        if limits != ServerLimits():  # else it names none
            self.limits = limits
        if self.stream is not stream:
            return
        if left := stream.adopt(self.limits):
            self._shared.commits.unsent(left)
            self._send_commits(stream, now)
        self._give_up_oversized(stream, now)
        if self.breaker.state != "closed":
            self.breaker.connected()

    def end(self, stream: StreamState, code: grpc.StatusCode, details: str, now: float) -> None:
        """Takes the end of its stream."""
        self._shared.stats.failed += 1
        accepts_less = code in _POISON and self.lower_limits(details)
        if accepts_less:
            log.warning("HistoSpec: %s accepts less than the client sent, %s: %s", self.name, code.name, details)
            if self.breaker.state == "trying":  # it runs, and accepts smaller messages
                self.breaker.success()
        else:
            if not self._shared.closed and details != CLOSED_HERE:
                self.unreachable(code, details, now)
            garbled = code is grpc.StatusCode.DATA_LOSS
            self.breaker.failure(now, not garbled and (not stream.connected or self.breaker.state != "closed"), garbled)
            if code in _POISON:  # one of these may be the reason
                for commit in [c for batch in stream.commits.values() for c in batch]:
                    commit.attempts += 1
        self.lose_stream()

    def lower_limits(self, details: str) -> bool:
        """Takes the limit that a refusal names. Returns whether the shard accepts less than was known."""
        known, self.limits = self.limits, self.limits.refused(details)
        return self.limits != known

    def _refuse(self, refused: Mapping[int, str], now: float) -> None:
        number, reason = next(iter(refused.items()))
        if line := self.contact.refused(number, reason, len(refused), now):
            self._shared.warn("HistoSpec: %s: %s", self.name, line)
        for number in refused:
            session = self._shared.sessions.get(number)
            if session is not None:
                session.refused = True
        self._shared.stats.refused += len(refused)

    # ---- its health -----------------------------------------------------------------------------------------------

    def end_of_client(self) -> None:
        """Has the log say that it answered no step, if that is so and its outage is not logged."""
        if line := self.contact.last_line(self.where, self._deadline):
            self._shared.warn("%s", line)

    def unreachable(self, code: grpc.StatusCode, details: str, now: float) -> None:
        """Notes that the shard does not answer, or answers with an error."""
        if self.contact.failed(code, details, now):
            self._shared.explain_later(self)

    def _may_ask(self, now: float) -> bool:
        """Returns whether to send the shard something now. If it is away, starts a connection and returns False."""
        if self._shared.closed or not self.endpoint.address:
            return False
        if self.breaker.state == "closed" or (self.stream is not None and self.stream.connected):
            allowed = self.breaker.allows(now)
        else:
            allowed = False
            if self.stream is None and self.breaker.allows(now):
                self._begin_stream()
        if not allowed:
            self.queue.forget_fresh()
        return allowed

    @property
    def _is_sought(self) -> bool:
        """Whether the loop has to turn for the shard: it is still to be found or connected."""
        connecting = self.stream is not None and not self.stream.connected
        return not self._shared.closed and (connecting or not self.endpoint.address)

    def _is_silent(self, now: float) -> bool:
        heard = None if self.stream is None else self.stream.heard
        return heard is not None and now - heard > self._shared.config.timeouts.silence
