"""The client without its network: sessions, shards, deadlines and what is kept for a server that is away.

Both faces (`aio.py` for asyncio, `sync.py` for threads) drive this one object. It never waits and never does I/O:
`advance_sessions` and `flush` leave messages in the outbox of a shard's conversation, and a `Stream` carries them. It
is thread-safe: every public method takes the one lock, for microseconds.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import numpy as np

from histospec.client import fork
from histospec.client.config import Config, Endpoint
from histospec.client.core import tokens
from histospec.client.core.budget import Budget
from histospec.client.core.commits import Commits
from histospec.client.core.conversation import Conversation, StepInput
from histospec.client.core.membership import Membership
from histospec.client.core.room import ServerLimits
from histospec.client.core.session import Commit, Session
from histospec.client.core.shard import Part, Pending, ShardState
from histospec.client.errors import UnknownSession
from histospec.client.values import Draft, Stats, Tokens
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")

_EMPTY = Draft(np.empty(0, np.int32), np.empty(0, np.float32))
CLOSED_HERE = "closed by the client"
"""How a stream ended that the client closed."""
_POISON = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


class Core:
    """Everything a client knows.

    `changed` is called, without the lock, whenever something arrived or a stream ended.
    """

    def __init__(self, config: Config, changed: Callable[[], None]) -> None:
        self.config = config
        self.closed = False
        """Nothing is sent any more."""
        self.looked = -math.inf
        """When shards were last looked for, on the monotonic clock."""
        self._members = Membership(config)
        self._changed = changed
        self._sessions: dict[int, Session] = {}
        self._owners: dict[int, ShardState] = {}  # of their problems
        self._next = 1
        self._waiting: dict[tuple[int, int], Part] = {}
        self._stats = Stats()
        self._commits = Commits(self._members, config.limits, self._stats)
        self._lock = threading.Lock()

    # ---- shards ---------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> list[ShardState]:
        """All of them."""
        return self._members.shards

    def knows_shards(self, now: float) -> bool:
        """Whether it is known which shards there are, or were a moment ago."""
        found = bool(self.shards[0].endpoint.address)
        return found and (not self.config.discover or now - self.looked < 2 * self.config.timeouts.discovery)

    def shard_of(self, prompt: bytes, problem: str) -> ShardState:
        """The shard that owns a problem."""
        return self._members.owner(prompt, problem)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """These are the shards from now on. Sessions and responses whose problem moves go to its new owner."""
        with self._lock:
            before = self._members.everybody
            for shard in self._members.update(endpoints):
                if shard.conversation is not None:
                    self._lose(shard)
            for session in self._sessions.values():
                former, owner = self._owners[session.number], self._members.owner_of(session)
                if owner is not former:
                    former.forget(session)
                    self._owners[session.number] = owner
                    owner.opens[session.number] = session  # it begins to read the history
            self._commits.move(before)
        log.info("shards: %s", ", ".join(f"{e.name} at {e.address}" for e in endpoints))

    def has_looked(self, now: float) -> None:
        """Shards were looked for; `update` has been told if any were found."""
        self.looked = now
        self._changed()

    # ---- sessions -------------------------------------------------------------------------------------------------

    def begin_sessions(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[Tokens] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[int]:
        """New sessions, known here alone until the next message."""
        fork.refuse()  # first of all: in a forked process another thread of the parent may hold the lock for ever
        for name, values in (("problems", problems), ("generated", generated), ("seeds", seeds)):
            if values is not None:
                tokens.same_length(name, values, "prompts", len(prompts))
        texts = [tokens.token_bytes(f"prompts[{i}]", p, empty=False) for i, p in enumerate(prompts)]
        names = [tokens.problem_name(f"problems[{i}]", p) for i, p in enumerate(problems or [None] * len(prompts))]
        begun = [tokens.token_bytes(f"generated[{i}]", g) for i, g in enumerate(generated or [()] * len(prompts))]
        drawn = tokens.seed_numbers("seeds", [None] * len(prompts) if seeds is None else seeds)
        with self._lock:
            opened = []
            for prompt, problem, text, seed in zip(texts, names, begun, drawn, strict=True):
                shard = self.shard_of(prompt, problem)
                session = Session(self._next, prompt, problem, text, seed)
                self._next += 1
                self._sessions[session.number] = session
                self._owners[session.number] = shard
                shard.opens[session.number] = session
                opened.append(session.number)
            return opened

    def end_sessions(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
    ) -> None:
        """Ends sessions; the server hears of it with the next message."""
        fork.refuse()
        count = len(sessions)
        with self._lock:
            chosen = self._find(sessions)
            epoch = [tokens.epoch_number(name, v) for name, v in tokens.each("epochs", epochs, count)]
            change = [tokens.change_count(name, v) for name, v in tokens.each("changes", changes, count)]
            reward = [tokens.reward_number(name, v) for name, v in tokens.each("rewards", rewards, count)]
            if logprobs is not None:
                tokens.same_length("logprobs", logprobs, "sessions", count)
            scores = [
                tokens.float_bytes(f"logprobs[{i}]", None if logprobs is None else logprobs[i], session.length)
                for i, session in enumerate(chosen)
            ]
            for i, session in enumerate(chosen):
                del self._sessions[session.number]
                shard = self._owners.pop(session.number)
                if not (commit and session.generated):
                    shard.forget(session)
                    continue
                shard.opens.pop(session.number, None)
                kept = Commit(session, epoch[i], reward[i], scores[i], change[i])
                if session.refused:
                    shard.forget(session)
                    self._commits.refuse(shard, kept, "its session was refused")
                else:
                    self._commits.keep(shard, kept)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def advance_sessions(
        self, sessions: Sequence[int], new_tokens: Sequence[Tokens], budget: Budget, now: float
    ) -> Pending:
        """Notes what each session gained, and leaves a message for every shard that is to be asked."""
        fork.refuse()
        tokens.same_length("new_tokens", new_tokens, "sessions", len(sessions))
        budget.check()
        flat, lengths = tokens.batch_bytes("new_tokens", new_tokens)
        with self._lock:
            chosen = self._find(sessions)
            batch = StepInput(chosen, [s.length for s in chosen], lengths, flat)
            start = 0
            for session, length in zip(chosen, lengths, strict=True):
                end = start + 4 * length
                session.generated += flat[start:end]
                session.length += length
                start = end
            self._commits.losses.report()
            self._give_up_silent(now)
            pending = Pending(len(chosen), now + self.config.timeouts.step, [], [])
            for shard, rows in self._split(chosen):
                self._ask(shard, batch, rows, budget, now, pending)
            return pending

    def _split(self, chosen: list[Session]) -> Iterator[tuple[ShardState, Sequence[int]]]:
        """The rows of a step by the shard that owns them."""
        if len(self.shards) == 1 and not self._stats.refused:
            if chosen:
                yield self.shards[0], range(len(chosen))
            return
        rows: dict[ShardState, list[int]] = {}
        for row, session in enumerate(chosen):
            if not session.refused:
                rows.setdefault(self._owners[session.number], []).append(row)
        yield from rows.items()

    def _ask(
        self, shard: ShardState, batch: StepInput, rows: Sequence[int], budget: Budget, now: float, pending: Pending
    ) -> None:
        self._stats.steps += 1
        if not self._may_ask(shard, now):
            self._stats.skipped += 1
            if self._to_be_found(shard):
                pending.touched.append(shard)
            return
        conversation = self._conversation(shard)
        if shard.opens:
            for row in rows:
                shard.opens.pop(batch.sessions[row].number, None)
        mine = batch if len(rows) == len(batch.sessions) else batch.take(rows)
        step = conversation.queue_step(mine, budget, now)
        if conversation.awaits(step):
            part = Part(shard, conversation, step, rows)
            pending.parts.append(part)
            self._waiting[id(conversation), step] = part
        self._commits.dispatch(shard, conversation, now)  # after the step, whose drafts the caller waits for
        self._take_misfits(shard, conversation)
        pending.touched.append(shard)

    def collect(self, pending: Pending, now: float) -> list[Draft]:
        """The drafts that came, empty ones for the others. What did not come is no longer waited for."""
        drafts = [_EMPTY] * pending.size
        count = total = 0
        for part in pending.parts:
            for rows, (offsets, text, probs) in part.drafts:
                total += len(text)
                for row, (start, end) in zip(rows, pairwise(offsets), strict=True):
                    if start != end:
                        drafts[part.rows[row]] = Draft(text[start:end], probs[start:end])
                        count += 1
        with self._lock:
            self._stats.drafts += count
            self._stats.draft_tokens += total
            for part in pending.parts:
                if not part.done:
                    part.done = True
                    self._expire(part, now)
        return drafts

    def abandon(self, pending: Pending) -> None:
        """Nobody will collect this step: the caller was cancelled. That says nothing about the server."""
        with self._lock:
            for part in pending.parts:
                part.done = True
                self._waiting.pop((id(part.conversation), part.step), None)
                part.conversation.forget_step(part.step)

    def _expire(self, part: Part, now: float) -> None:
        shard, conversation = part.shard, part.conversation
        self._waiting.pop((id(conversation), part.step), None)
        self._stats.late += 1
        shard.breaker.failure(now)
        silent = self._silent(conversation, now)
        conversation.late += conversation.forget_step(part.step)
        if silent and shard.conversation is conversation:
            log.warning("%s: no word for %.1f s, connecting anew", shard.name, self.config.timeouts.silence)
            self._lose(shard)

    def _silent(self, conversation: Conversation, now: float) -> bool:
        return conversation.heard is not None and now - conversation.heard > self.config.timeouts.silence

    def _give_up_silent(self, now: float) -> None:
        """Shards that leave are asked for no more drafts, whose absence would tell that they are gone."""
        for shard in self._members.leaving:
            if shard.conversation is not None and self._silent(shard.conversation, now):
                self._lose(shard)

    # ---- what waits -----------------------------------------------------------------------------------------------

    def flush(self, now: float) -> list[ShardState]:
        """Leaves a message for every shard that has opens or closes waiting and may be asked.

        Returns:
            Those shards, and any that is to be found, or owes an acknowledgement and is well.
        """
        fork.refuse()
        with self._lock:
            self._commits.losses.report()
            self._give_up_silent(now)
            touched = self._members.leaving
            for shard in self.shards:
                if not (shard.opens or shard.closes or shard.due(now)):
                    if not shard.settled and shard.breaker.state == "closed":  # it owes an acknowledgement
                        touched.append(shard)
                    continue
                if not self._may_ask(shard, now):
                    if self._to_be_found(shard):
                        touched.append(shard)
                    continue
                conversation = self._conversation(shard)
                queued = conversation.queued
                self._commits.dispatch(shard, conversation, now)
                conversation.queue_opens(shard.opens.values())
                shard.opens.clear()
                self._take_misfits(shard, conversation)
                if conversation.queued > queued or not shard.settled:  # else the stream has no place for more
                    touched.append(shard)
        return touched

    def settled(self, shards: Sequence[ShardState]) -> bool:
        """Whether these shards were told everything and have acknowledged every commit, or are lost."""
        with self._lock:
            return all(shard.settled for shard in shards)

    def overdue(self, shards: Sequence[ShardState], now: float) -> None:
        """A flush waited in vain for these shards."""
        with self._lock:
            for shard in shards:
                if shard.conversation and shard.conversation.commits and shard.breaker.state != "closed":
                    shard.breaker.failure(now)

    def stats(self) -> Stats:
        """A copy of the counters."""
        fork.refuse()
        with self._lock:
            everybody = self._members.everybody
            return replace(
                self._stats,
                pending_commits=self._commits.pending,
                reopened=self._stats.reopened + sum(s.conversation.reopened for s in everybody if s.conversation),
                breakers={s.name: s.state for s in self.shards},
                shards=self._commits.by_shard(),
            )

    def report_losses(self) -> None:
        """Logs what was dropped and not said yet: the client ends."""
        with self._lock:
            self._commits.losses.report(all_of_them=True)

    # ---- what the streams report ----------------------------------------------------------------------------------

    def wrote(self, conversation: Conversation, sequence: int) -> None:
        """gRPC has taken a message."""
        conversation.wrote(sequence)
        if not (conversation.outbox or conversation.owes):  # else the answer says so
            self._changed()

    def received(self, shard: ShardState, conversation: Conversation, response: pb.DraftResponse, now: float) -> None:
        """A response arrived.

        Raises:
            GarbledReply: it does not add up; end the stream.
        """
        with self._lock:
            if shard.conversation is not conversation:
                return
            reply = conversation.interpret(response, now)
            if reply.awaited is not None and reply.drafts is not None:
                step, rows = reply.awaited
                part = self._waiting[id(conversation), step]
                part.drafts.append((rows, reply.drafts))
                if not conversation.awaits(step):
                    self._finish(part)
                    shard.breaker.success()
            elif reply.acknowledged and shard.breaker.state != "closed":
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
        self._changed()

    def learned(self, shard: ShardState, conversation: Conversation, limits: ServerLimits, now: float) -> None:
        """The shard has said what it takes, before anything was written."""
        with self._lock:
            if limits == ServerLimits():  # an older server, which says nothing
                limits = shard.limits
            shard.limits = limits
            if shard.conversation is conversation:
                self._commits.unsent(shard, conversation.adopt(limits))
                self._commits.dispatch(shard, conversation, now)
                self._take_misfits(shard, conversation)
        self._changed()

    def _take_misfits(self, shard: ShardState, conversation: Conversation) -> None:
        """Gives up sessions and commits of which a part is too large for any message."""
        for commit, reason in conversation.rejected:
            self._commits.drop(shard, commit, reason)
        conversation.rejected.clear()
        for part in [p for p in self._waiting.values() if p.conversation is conversation]:
            if not conversation.awaits(part.step):
                self._finish(part)
        refused, conversation.refused = conversation.refused, {}
        if refused:
            for number in refused:
                if number in conversation.held:
                    shard.closes.append(number)
            self._refuse(shard, refused)

    def _finish(self, part: Part) -> None:
        part.done = True
        self._waiting.pop((id(part.conversation), part.step), None)

    def ended(
        self, shard: ShardState, conversation: Conversation, code: grpc.StatusCode, details: str, now: float
    ) -> None:
        """The stream of a conversation ended, for whatever reason."""
        with self._lock:
            if shard.conversation is not conversation:
                return
            self._stats.failed += 1
            if (
                shard.breaker.state == "closed" and not self.closed and details != CLOSED_HERE
            ):  # said once, not with every try
                log.warning("%s: stream ended, %s: %s", shard.name, code.name, details)
            known = shard.limits
            shard.limits = known.refused(details) if code in _POISON else known
            if shard.limits == known:
                shard.breaker.failure(now)
            elif shard.breaker.state == "trying":  # it is there, and takes smaller messages
                shard.breaker.success()
            if code in _POISON and shard.limits == known:  # one of these may be why
                for commit in [c for batch in conversation.commits.values() for c in batch]:
                    commit.attempts += 1
            self._lose(shard)
        self._changed()

    def _may_ask(self, shard: ShardState, now: float) -> bool:
        return bool(shard.endpoint.address) and not self.closed and shard.breaker.allows(now)

    def _to_be_found(self, shard: ShardState) -> bool:
        return not (shard.endpoint.address or self.closed)

    def _conversation(self, shard: ShardState) -> Conversation:
        if shard.conversation is None:
            shard.conversation = Conversation(self.config.namespace, self.config.limits, shard.limits)
        return shard.conversation

    def _lose(self, shard: ShardState) -> None:
        """Forgets a conversation: nobody waits for it any more, and its commits are to be sent again."""
        conversation = shard.conversation
        assert conversation is not None
        for part in [p for p in self._waiting.values() if p.conversation is conversation]:
            self._finish(part)
        again = [commit for batch in conversation.commits.values() for commit in batch]
        self._stats.reopened += conversation.reopened
        shard.conversation = None
        shard.closes.clear()  # sessions end with their stream
        self._commits.unsent(shard, again)

    def _refuse(self, shard: ShardState, refused: dict[int, str]) -> None:
        number, reason = next(iter(refused.items()))
        others = f" and {len(refused) - 1} more are" if len(refused) > 1 else " is"
        log.warning("%s: session %d%s refused: %s", shard.name, number, others, reason)
        for number in refused:
            session = self._sessions.get(number)
            if session is not None:
                session.refused = True
        self._stats.refused += len(refused)

    def _find(self, sessions: Sequence[int]) -> list[Session]:
        try:
            chosen = [self._sessions[s] for s in sessions]
        except KeyError:
            i, number = next((i, s) for i, s in enumerate(sessions) if s not in self._sessions)
            raise UnknownSession(f"sessions[{i}]: {number} is not an open session of this client") from None
        if len(set(chosen)) < len(chosen):
            raise ValueError("sessions: a session appears twice")
        return chosen
