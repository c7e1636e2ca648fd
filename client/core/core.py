"""The client without its network: open sessions, the steps that callers take, and the shard that owns each session.

Both clients (`aio.py` for asyncio, `sync.py` for threads) drive this one object. It never waits and never does I/O:
`advance_sessions` and `flush` leave messages in the outbox of a shard's conversation (`exchange.py`), and a `Stream`
carries them. It is thread-safe: every public method takes the one lock, for microseconds.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import numpy as np

from histospec.client import arguments, fork
from histospec.client.config import DISCOVER, Config, Endpoint
from histospec.client.core import tokens
from histospec.client.core.budget import NO_REPORT, Budget, Report, StepInput
from histospec.client.core.commits import Commits
from histospec.client.core.conversation import Conversation
from histospec.client.core.exchange import Exchange
from histospec.client.core.membership import Membership
from histospec.client.core.news import Outage
from histospec.client.core.room import ServerLimits
from histospec.client.core.session import Commit, Session, find
from histospec.client.core.shard import Pending, ShardState
from histospec.client.recorder import recorder
from histospec.client.values import Draft, Stats, Tokens
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")

_EMPTY = Draft(np.empty(0, np.int32), np.empty(0, np.float32))


class Core:
    """The state of a client.

    It calls `changed`, without the lock, whenever something has arrived or a stream has ended.
    """

    def __init__(self, config: Config, changed: Callable[[], None]) -> None:
        self.config = config
        self.looked = -math.inf
        """When the client last looked for shards, on the monotonic clock."""
        self.recorder = recorder(config)
        """Writes finished responses to the file of HISTOSPEC_RECORD, in its own thread; None if that is not set."""
        self._members = Membership(config)
        self._changed = changed
        self._sessions: dict[int, Session] = {}
        self._owners: dict[int, ShardState] = {}  # the shard that owns the problem of each session
        self._next = 1
        self._stats = Stats()
        self._commits = Commits(self._members, config.limits, self._stats)
        self.explain: Callable[[ShardState], None] = self.tell
        """Logs why a shard does not answer: `tell`, or a function that finds out more first. Does not wait."""
        self._exchange = Exchange(
            config, self._members, self._commits, self._sessions, self._stats, lambda shard: self.explain(shard)
        )
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether the client sends nothing any more."""
        return self._exchange.closed

    def stop(self) -> None:
        """Stops sending, and closes the recorder."""
        self._exchange.closed = True
        if self.recorder is not None:
            self.recorder.close()

    def patience(self, timeout: float | None) -> float:
        """Returns how long a flush waits, in seconds."""
        return self.config.timeouts.step if timeout is None else arguments.seconds("timeout", timeout, zero=True)

    def summary(self) -> str:
        """Returns a line for `repr`. Takes no lock: another thread may hold it, or a debugger may have stopped one."""
        config = self.config
        where = ",".join(e.address if e.name == e.address else f"{e.name}={e.address}" for e in config.endpoints)
        state = " shut down" if self.closed else ""
        breakers = {shard.name: shard.state for shard in list(self.shards)}
        return (
            f"namespace={config.namespace!r} endpoint={DISCOVER if config.discover else ''}{where} "
            f"breakers={breakers} sessions={len(self._sessions)} pending_commits={self._commits.pending}{state}"
        )

    # ---- shards ---------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> list[ShardState]:
        """All shards."""
        return self._members.shards

    def knows_shards(self, now: float) -> bool:
        """Returns whether the client knows the shards, or knew them a moment ago."""
        found = bool(self.shards[0].endpoint.address)
        return found and (not self.config.discover or now - self.looked < 2 * self.config.timeouts.discovery)

    def shard_of(self, prompt: bytes, problem: str) -> ShardState:
        """Returns the shard that owns a problem."""
        return self._members.owner(prompt, problem)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Replaces the shards. Sessions and responses whose problem moves go to its new owner."""
        with self._lock:
            before, contact = self._members.everybody, self.shards[0].contact
            nowhere = not self.shards[0].endpoint.address
            for shard in self._members.update(endpoints):
                if shard.conversation is not None:
                    self._exchange.lose(shard)
            for session in self._sessions.values():
                former, owner = self._owners[session.number], self._members.owner_of(session)
                if owner is not former:
                    former.forget(session)
                    self._owners[session.number] = owner
                    owner.opens[session.number] = session  # it begins to read the history
            self._commits.move(before)
            if nowhere and contact.lost:
                for shard in self.shards:
                    shard.contact = contact.handed_on()
        log.info("HistoSpec: shards: %s", ", ".join(f"{e.name} at {e.address}" for e in endpoints))

    def has_looked(self, now: float) -> None:
        """Notes that the client has looked for shards. If it found any, it called `update` before."""
        self.looked = now
        if not self.shards[0].endpoint.address:
            self.missed(self.shards[0], grpc.StatusCode.UNAVAILABLE, "no shard was found there", now)
        self._changed()

    # ---- lines in the log about shards ----------------------------------------------------------------------------

    def greeted(self, shard: ShardState) -> None:
        """Notes that a shard has answered; the caller logs it."""
        with self._lock:
            shard.contact.greeted()

    def missed(self, shard: ShardState, code: grpc.StatusCode, details: str, now: float) -> None:
        """Notes that a shard, asked outside a stream, does not answer or refuses this client."""
        with self._lock:
            if not self.closed:
                self._exchange.out_of_touch(shard, code, details, now)
        self._say()

    def tell(self, shard: ShardState, outage: Outage | None = None) -> None:
        """Logs why a shard does not answer, unless it answers by now.

        Args:
            shard: the shard.
            outage: the reason; None: the status that gRPC reported.
        """
        with self._lock:
            contact = shard.contact
            if not contact.lost or self.closed:
                return
            contact.told()
        log.warning("%s", outage or Outage.by_status(shard.where, contact.code, contact.details))

    def _say(self) -> None:
        """Logs the lines that wait, without the lock."""
        while self._exchange.unsaid:
            with contextlib.suppress(IndexError):  # another thread logs it
                self._exchange.unsaid.popleft()()

    # ---- sessions -------------------------------------------------------------------------------------------------

    def begin_sessions(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[Tokens] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[int]:
        """Opens sessions, which the server learns of with the next message. Returns their ids."""
        fork.refuse()  # first: in a forked process a thread of the parent may hold the lock for ever
        arguments.listed("prompts", prompts, arguments.PROMPTS)
        each = partial(arguments.for_each, other="prompts", size=len(prompts))
        given = each("problems", problems, arguments.PROBLEMS)
        pieces = each("generated", [()] * len(prompts) if generated is None else generated, arguments.TOKEN_LISTS)
        numbers = each("seeds", seeds, arguments.SEEDS)
        texts = [tokens.token_bytes(f"prompts[{i}]", p, empty=False) for i, p in enumerate(prompts)]
        names = [tokens.problem_name(f"problems[{i}]", p) for i, p in enumerate(given)]
        begun = [tokens.token_bytes(f"generated[{i}]", g) for i, g in enumerate(pieces)]
        drawn = tokens.seed_numbers("seeds", numbers)
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
        alternatives: Sequence[bytes | None] | None = None,
    ) -> None:
        """Ends sessions; the server learns of it with the next message."""
        fork.refuse()
        arguments.listed("sessions", sessions, arguments.SESSIONS)
        arguments.flag("commit", commit)
        count = len(sessions)
        with self._lock:
            chosen = find(self._sessions, sessions)
            epoch = [tokens.epoch_number(name, v) for name, v in tokens.each("epochs", epochs, count)]
            change = [tokens.change_count(name, v) for name, v in tokens.each("changes", changes, count)]
            reward = [tokens.reward_number(name, v) for name, v in tokens.each("rewards", rewards, count)]
            given = arguments.for_each("logprobs", logprobs, arguments.LOGPROBS, "sessions", count)
            scores = [
                tokens.float_bytes(f"logprobs[{i}]", score, session.length)
                for i, (score, session) in enumerate(zip(given, chosen, strict=True))
            ]
            packed = arguments.for_each("alternatives", alternatives, arguments.ALTERNATIVES, "sessions", count)
            others = [
                tokens.alternative_bytes(f"alternatives[{i}]", some, session.length)
                for i, (some, session) in enumerate(zip(packed, chosen, strict=True))
            ]
            for i, session in enumerate(chosen):
                del self._sessions[session.number]
                shard = self._owners.pop(session.number)
                if not (commit and session.generated):
                    shard.forget(session)
                    continue
                shard.opens.pop(session.number, None)
                self._record(session, epoch[i], change[i], reward[i])
                kept = Commit(session, epoch[i], reward[i], scores[i], change[i], others[i])
                if session.refused:
                    shard.forget(session)
                    self._commits.refuse(shard, kept, "its session was refused")
                else:
                    self._commits.keep(shard, kept)

    def _record(self, session: Session, epoch: int | None, changes: int, reward: float | None) -> None:
        if self.recorder is not None:
            self.recorder.keep(
                session.prompt,
                session.generated,
                problem=session.problem,
                epoch=epoch,
                changes=changes,
                seed=session.seed,
                reward=reward,
            )

    # ---- steps ----------------------------------------------------------------------------------------------------

    def advance_sessions(
        self,
        sessions: Sequence[int],
        new_tokens: Sequence[Tokens],
        budget: Budget,
        now: float,
        report: Report = NO_REPORT,
    ) -> Pending:
        """Appends the new tokens to each session, and leaves a message for every shard that may be asked."""
        fork.refuse()
        arguments.listed("sessions", sessions, arguments.SESSIONS)
        arguments.listed("new_tokens", new_tokens, arguments.TOKEN_LISTS)
        arguments.same_length("new_tokens", new_tokens, "sessions", len(sessions))
        budget.check()
        counts = report.counts(len(sessions))
        flat, lengths = tokens.batch_bytes("new_tokens", new_tokens)
        with self._lock:
            chosen = find(self._sessions, sessions)
            step_input = StepInput(chosen, [s.length for s in chosen], lengths, flat, counts)
            start = 0
            for session, length in zip(chosen, lengths, strict=True):
                end = start + 4 * length
                session.generated += flat[start:end]
                session.length += length
                start = end
            self._commits.losses.report()
            self._exchange.give_up_silent(now)
            pending = Pending(len(chosen), now + self.config.timeouts.step, [], [])
            for shard, rows in self._split(chosen):
                self._exchange.ask(shard, step_input, rows, budget, now, pending)
        self._say()
        return pending

    def _split(self, chosen: list[Session]) -> Iterator[tuple[ShardState, Sequence[int]]]:
        """Yields each shard that owns sessions of a step, with their rows."""
        if len(self.shards) == 1 and not self._stats.refused:
            if chosen:
                yield self.shards[0], range(len(chosen))
            return
        rows: dict[ShardState, list[int]] = {}
        for row, session in enumerate(chosen):
            if not session.refused:
                rows.setdefault(self._owners[session.number], []).append(row)
        yield from rows.items()

    def collect(self, pending: Pending, now: float) -> list[Draft]:
        """Returns the drafts that have arrived, and empty ones for the others. Stops waiting for those."""
        drafts = [_EMPTY] * pending.size
        count = total = 0
        for part in pending.parts:
            for rows, (offsets, text, probs) in part.drafts:
                total += len(text)
                places = part.rows
                start = 0
                for row, end in zip(rows, offsets[1:], strict=True):
                    if start != end:
                        drafts[places[row]] = Draft(text[start:end], probs[start:end])
                        count += 1
                        start = end
        with self._lock:
            self._stats.drafts += count
            self._stats.draft_tokens += total
            for part in pending.parts:
                if not part.done:
                    self._exchange.expire(part, now)
        self._say()
        return drafts

    def abandon(self, pending: Pending) -> None:
        """Drops a step whose caller was cancelled. This says nothing about the server."""
        with self._lock:
            for part in pending.parts:
                self._exchange.abandon(part)

    # ---- what waits to be sent ------------------------------------------------------------------------------------

    def flush(self, now: float) -> list[ShardState]:
        """Leaves a message for every shard that has opens or closes waiting and may be asked.

        Returns:
            Those shards, the healthy ones that owe an acknowledgement, and those that are still to be found.
        """
        fork.refuse()
        with self._lock:
            self._commits.losses.report()
            self._exchange.give_up_silent(now)
            touched = self._members.leaving
            touched += [shard for shard in self.shards if self._exchange.tell(shard, now)]
        return touched

    def settled(self, shards: Sequence[ShardState]) -> bool:
        """Returns whether each of these shards has all messages and has acknowledged every commit, or is lost."""
        with self._lock:
            return all(shard.settled for shard in shards)

    def overdue(self, shards: Sequence[ShardState], now: float) -> None:
        """Notes that a flush waited in vain for these shards."""
        with self._lock:
            for shard in shards:
                if shard.conversation and shard.conversation.commits and shard.breaker.state != "closed":
                    shard.breaker.failure(now)

    def stats(self) -> Stats:
        """Returns a copy of the counters."""
        fork.refuse()
        with self._lock:
            everybody = self._members.everybody
            return replace(
                self._stats,
                pending_commits=self._commits.pending,
                reopened=self._stats.reopened + sum(s.conversation.reopened for s in everybody if s.conversation),
                breakers={s.name: s.state for s in self.shards},
                shards=self._commits.by_shard(),
                recorded=self.recorder.written if self.recorder else 0,
                unrecorded=self.recorder.lost if self.recorder else 0,
            )

    def report_losses(self) -> None:
        """Logs the dropped responses that are not logged yet, because the client ends."""
        with self._lock:
            self._commits.losses.report(all_of_them=True)

    # ---- what the streams report ----------------------------------------------------------------------------------

    def wrote(self, conversation: Conversation, sequence: int) -> None:
        """Notes that gRPC has taken a message."""
        conversation.wrote(sequence)
        if not (conversation.outbox or conversation.owes):  # else the answer calls it
            self._changed()

    def received(self, shard: ShardState, conversation: Conversation, response: pb.DraftResponse, now: float) -> None:
        """Takes a response that has arrived.

        Raises:
            GarbledReply: the response contradicts itself or what was sent; end the stream.
        """
        with self._lock:
            if shard.conversation is not conversation:
                return
            self._exchange.take_reply(shard, conversation, response, now)
        self._say()
        self._changed()

    def learned(self, shard: ShardState, conversation: Conversation, limits: ServerLimits, now: float) -> None:
        """Takes the limits of a shard that has just connected, before anything is written."""
        with self._lock:
            self._exchange.take_limits(shard, conversation, limits, now)
        self._changed()

    def ended(
        self, shard: ShardState, conversation: Conversation, code: grpc.StatusCode, details: str, now: float
    ) -> None:
        """Notes that the stream of a conversation has ended, for any reason."""
        with self._lock:
            if shard.conversation is not conversation:
                return
            self._exchange.take_end(shard, conversation, code, details, now)
        self._say()
        self._changed()
