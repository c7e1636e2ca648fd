"""Leaves messages for the shards, and applies what their answers change.

Belongs to the core, which locks. It keeps a conversation for each shard that may be asked, gives up those that fall
silent, and knows which steps still wait for an answer.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import grpc

from histospec.client.config import Config
from histospec.client.core.budget import Budget, StepInput
from histospec.client.core.commits import Commits
from histospec.client.core.conversation import Conversation
from histospec.client.core.membership import Membership
from histospec.client.core.room import ServerLimits
from histospec.client.core.session import Session
from histospec.client.core.shard import Part, Pending, ShardState
from histospec.client.values import Stats
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")

CLOSED_HERE = "closed by the client"
"""Details of the end of a stream that the client closed."""
_POISON = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Exchange:
    """The conversations of one client. Not thread-safe; its owner locks.

    Args:
        sessions: the open sessions, by number; the exchange marks those that a shard refuses.
        stats: the counters to increase.
        explain: logs why a shard does not answer.
    """

    def __init__(
        self,
        config: Config,
        members: Membership,
        commits: Commits,
        sessions: Mapping[int, Session],
        stats: Stats,
        explain: Callable[[ShardState], None],
    ) -> None:
        self.closed = False
        """Whether the client sends nothing any more."""
        self.unsaid: deque[Callable[[], None]] = deque()
        """Log lines about shards, to call after the owner's lock is released: a line may wait for a terminal."""
        self._explain = explain
        self._config = config
        self._members = members
        self._commits = commits
        self._sessions = sessions
        self._stats = stats
        self._waiting: dict[tuple[int, int], Part] = {}  # by conversation and step

    # ---- to the shards --------------------------------------------------------------------------------------------

    def ask(
        self,
        shard: ShardState,
        step_input: StepInput,
        rows: Sequence[int],
        budget: Budget,
        now: float,
        pending: Pending,
    ) -> None:
        """Leaves a message with these rows of a step, and notes in `pending` what the caller has to wait for."""
        self._stats.steps += 1
        if not self._may_ask(shard, now):
            self._stats.skipped += 1
            step_input.hold_back(rows)
            if shard.contact.remind(now):
                self.unsaid.append(partial(self._explain, shard))
            if self._is_sought(shard):
                pending.touched.append(shard)
            return
        conversation = self._conversation(shard)
        if budget.max_tokens > shard.limits.draft and shard.contact.cuts(budget.max_tokens, shard.limits.draft):
            line = "HistoSpec: %s drafts at most %d tokens (--max-draft-tokens), and %d are asked for; drafts are cut"
            self.unsaid.append(partial(log.warning, line, shard.name, shard.limits.draft, budget.max_tokens))
        if shard.opens:
            for row in rows:
                shard.opens.pop(step_input.sessions[row].number, None)
        mine = step_input if len(rows) == len(step_input.sessions) else step_input.take(rows)
        flow = conversation.flow
        step = conversation.queue_step(mine, budget, now, shard.opening.room - flow.opens)
        if conversation.awaits(step):
            part = Part(shard, conversation, step, rows, now, flow.opens, flow.commits)
            pending.parts.append(part)
            self._waiting[id(conversation), step] = part
        # The caller waits for the step's drafts, so the rest follows it: first sessions to draft again, then commits.
        room = shard.committing.room - flow.commits
        if conversation.behind:
            # If the server owes no answer, none will report what it has applied.
            conversation.queue_opens(conversation.behind, shard.opening.room - flow.opens * conversation.owes)
            room = 0
        self._commits.dispatch(shard, conversation, now, room)
        self._take_misfits(shard, conversation)
        pending.touched.append(shard)

    def tell(self, shard: ShardState, now: float) -> bool:
        """Leaves a message with the opens and closes that wait. Returns whether there is anything to write or wait for.

        This is also the case if the shard is still to be found, or if it is healthy and owes an acknowledgement.
        """
        if not (shard.opens or shard.closes or shard.due(now)):
            return not shard.settled and shard.breaker.state == "closed"
        if not self._may_ask(shard, now):
            return self._is_sought(shard)
        conversation = self._conversation(shard)
        queued = conversation.queued
        self._commits.dispatch(shard, conversation, now)
        conversation.queue_opens(shard.opens.values())
        shard.opens.clear()
        self._take_misfits(shard, conversation)
        return conversation.queued > queued or not shard.settled  # else the stream has no place for more

    def expire(self, part: Part, now: float) -> None:
        """Counts this part as late: its drafts did not arrive in time."""
        self._finish(part)
        shard, conversation = part.shard, part.conversation
        self._stats.late += 1
        shard.opening.late(part.opens)
        shard.committing.late(part.commits)
        silent = self._silent(conversation, now)
        shard.breaker.failure(now, soon=silent or bool(conversation.behind) or part.commits > 0)
        conversation.late += conversation.forget_step(part.step)
        if silent and shard.conversation is conversation:
            silence = f"no answer for {self._config.timeouts.silence:g} s, reconnecting"
            self.out_of_touch(shard, grpc.StatusCode.DEADLINE_EXCEEDED, silence, now)
            self.lose(shard)

    def abandon(self, part: Part) -> None:
        """Stops waiting for this part, which says nothing about the shard."""
        self._finish(part)
        part.conversation.forget_step(part.step)

    def give_up_silent(self, now: float) -> None:
        """Gives up leaving shards that have fallen silent. They get no steps, so no late draft would show this."""
        for shard in self._members.leaving:
            if shard.conversation is not None and self._silent(shard.conversation, now):
                self.lose(shard)

    def lose(self, shard: ShardState) -> None:
        """Forgets the conversation of a shard: ends the waits for it, and puts its commits back to be sent again."""
        conversation = shard.conversation
        assert conversation is not None
        for part in self._parts(conversation):
            self._finish(part)
        again = [commit for message in conversation.commits.values() for commit in message]
        self._stats.reopened += conversation.reopened
        shard.conversation = None
        shard.opening.begin_again()
        shard.committing.begin_again()
        shard.fresh = 0
        shard.closes.clear()  # sessions end with their stream
        self._commits.unsent(shard, again)

    # ---- from the shards ------------------------------------------------------------------------------------------

    def take_reply(self, shard: ShardState, conversation: Conversation, response: pb.DraftResponse, now: float) -> None:
        """Takes a response that has arrived.

        Raises:
            GarbledReply: the response contradicts itself or what was sent.
        """
        reply = conversation.interpret(response, now)
        if not shard.contact.answers:
            self._reached(shard, now)
        if reply.awaited is not None and reply.drafts is not None:
            step, rows = reply.awaited
            part = self._waiting[id(conversation), step]
            part.drafts.append((rows, reply.drafts))
            if not conversation.awaits(step):
                self._finish(part)
                shard.breaker.success()
                shard.opening.answered(now - part.begun, part.opens, bool(conversation.behind))
                shard.committing.answered(now - part.begun, part.commits, bool(shard.commits))
        elif reply.acknowledged and shard.breaker.state == "trying":
            shard.breaker.success()
        self._commits.acknowledged(shard, reply.acknowledged)
        for commit in reply.turned_down:
            self._commits.drop(shard, commit, reply.refused[commit.session.number])
        if reply.postponed:
            self._commits.postpone(shard, reply.postponed, reply.why_postponed, now)
        self._commits.again(shard, reply.unknown)
        if reply.refused:
            for number in reply.refused:
                conversation.held.pop(number, None)
            self._refuse(shard, reply.refused)

    def take_limits(self, shard: ShardState, conversation: Conversation, limits: ServerLimits, now: float) -> None:
        """Takes the limits of a shard that has just connected, before anything is written."""
        if limits == ServerLimits():  # an older server, which names no limits
            limits = shard.limits
        shard.limits = limits
        if shard.conversation is conversation:
            if left := conversation.adopt(limits):
                self._commits.unsent(shard, left)
                self._commits.dispatch(shard, conversation, now)
            self._take_misfits(shard, conversation)
            if shard.breaker.state != "closed":
                shard.breaker.connected()

    def take_end(
        self, shard: ShardState, conversation: Conversation, code: grpc.StatusCode, details: str, now: float
    ) -> None:
        """Takes the end of the stream of the shard's conversation."""
        self._stats.failed += 1
        known = shard.limits
        shard.limits = known.refused(details) if code in _POISON else known
        if shard.limits != known:
            log.warning("HistoSpec: %s accepts less than the client sent, %s: %s", shard.name, code.name, details)
        elif not self.closed and details != CLOSED_HERE:
            self.out_of_touch(shard, code, details, now)
        if shard.limits == known:
            shard.breaker.failure(now, soon=not conversation.connected or shard.breaker.state != "closed")
        elif shard.breaker.state == "trying":  # it runs, and accepts smaller messages
            shard.breaker.success()
        if code in _POISON and shard.limits == known:  # one of these may be the reason
            for commit in [c for message in conversation.commits.values() for c in message]:
                commit.attempts += 1
        self.lose(shard)

    def _take_misfits(self, shard: ShardState, conversation: Conversation) -> None:
        """Gives up sessions and commits with a part that is too large for any message."""
        for commit, reason in conversation.rejected:
            self._commits.drop(shard, commit, reason)
        conversation.rejected.clear()
        for part in self._parts(conversation):
            if not conversation.awaits(part.step):
                self._finish(part)
        refused, conversation.refused = conversation.refused, {}
        if refused:
            for number in refused:
                if number in conversation.held:
                    shard.closes.append(number)
            self._refuse(shard, refused)

    def _refuse(self, shard: ShardState, refused: Mapping[int, str]) -> None:
        number, reason = next(iter(refused.items()))
        others = f" and {len(refused) - 1} more are" if len(refused) > 1 else " is"
        log.warning("HistoSpec: %s: session %d%s refused: %s", shard.name, number, others, reason)
        for number in refused:
            session = self._sessions.get(number)
            if session is not None:
                session.refused = True
        self._stats.refused += len(refused)

    # ---- the state of a shard -------------------------------------------------------------------------------------

    def out_of_touch(self, shard: ShardState, code: grpc.StatusCode, details: str, now: float) -> None:
        """Notes that the shard does not answer, or answers with an error."""
        if shard.contact.failed(code, details, now):
            self.unsaid.append(partial(self._explain, shard))

    def _reached(self, shard: ShardState, now: float) -> None:
        line = shard.contact.reached(shard.where, self._config.namespace, now)
        if line is not None:
            self.unsaid.append(partial(log.info, "%s", line))

    def _may_ask(self, shard: ShardState, now: float) -> bool:
        """Returns whether to send the shard something now. If it is away, starts a connection and returns False."""
        conversation, breaker = shard.conversation, shard.breaker
        if self.closed or not shard.endpoint.address:
            return False
        if breaker.state == "closed" or (conversation is not None and conversation.connected):
            allowed = breaker.allows(now)
        else:
            allowed = False
            if conversation is None and breaker.allows(now):
                self._conversation(shard)
        if not allowed:
            shard.fresh = 0
        return allowed

    def _is_sought(self, shard: ShardState) -> bool:
        """Returns whether the loop has to turn for the shard: it is still to be found or connected."""
        connecting = shard.conversation is not None and not shard.conversation.connected
        return not self.closed and (connecting or not shard.endpoint.address)

    def _silent(self, conversation: Conversation, now: float) -> bool:
        return conversation.heard is not None and now - conversation.heard > self._config.timeouts.silence

    def _conversation(self, shard: ShardState) -> Conversation:
        if shard.conversation is None:
            shard.conversation = Conversation(self._config.namespace, self._config.limits, shard.limits)
        return shard.conversation

    def _parts(self, conversation: Conversation) -> list[Part]:
        """Returns the parts that wait for a conversation."""
        return [part for part in self._waiting.values() if part.conversation is conversation]

    def _finish(self, part: Part) -> None:
        part.done = True
        self._waiting.pop((id(part.conversation), part.step), None)
