"""The client without its network: open sessions, the steps that callers take, and the shard that owns each session.

Both clients (`aio.py` for asyncio, `sync.py` for threads) drive this one object. It never waits and never does I/O:
`send` and `flush` leave messages in the outboxes of streams, and a `Stream` of the transport carries them. It is
thread-safe: every public method takes the one lock, for microseconds.

A step enters it twice: `send`, and `reply` with the response. `collect` takes the lock only for a late step.
"""

from __future__ import annotations  # so that help() names types as they are written here

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from histospec.client import arguments, quiet_grpc
from histospec.client.config import DISCOVER, Config, Endpoint
from histospec.client.core.commits import Commit, Commits
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.outage_log import Outage
from histospec.client.core.session import Session, find
from histospec.client.core.shard import Membership, Pending, Shard, Shared
from histospec.client.core.step import Budget, StepInput, report_counts
from histospec.client.core.stream_state import StreamState
from histospec.client.recorder import recorder
from histospec.client.values import Draft, Stats, Tokens
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")


class Core:
    """The state of a client.

    Args:
        config: the configuration.
        changed: called, without the lock, whenever something has arrived or a stream has ended.
        clock: returns seconds that never decrease.
    """

    def __init__(
        self, config: Config, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.changed = changed
        self._clock = clock
        self.looked_at = -math.inf
        """When the client last looked for shards."""
        self.recorder = recorder(config)
        """Writes finished responses to the file of HISTOSPEC_RECORD, in its own thread; None if that is not set."""
        self.explain: Callable[[Shard], None] = self.log_outage
        """Logs why a shard does not answer: `log_outage`, or a function that finds out more first. Does not wait."""
        self._sessions: dict[int, Session] = {}
        self._owners: dict[int, Shard] = {}  # the shard that owns the problem of each session
        self._next = 1
        self._stats = Stats()
        self._commits = Commits(config.limits, self._stats, lambda session: self._owner(session).queue)
        self._shared = Shared(config, self._stats, self._sessions, self._commits, lambda shard: self.explain(shard))
        self._members = Membership(self._shared)
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether the client sends nothing any more."""
        return self._shared.closed

    def stop(self) -> None:
        """Stops sending, and closes the recorder."""
        self._shared.closed = True
        if self.recorder is not None:
            self.recorder.close()

    def flush_seconds(self, timeout: float | None) -> float:
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
    def shards(self) -> list[Shard]:
        """All shards."""
        return self._members.shards

    def knows_shards(self) -> bool:
        """Returns whether the client knows the shards, or knew them a moment ago."""
        found = bool(self.shards[0].endpoint.address)
        return found and (
            not self.config.discover or self._clock() - self.looked_at < 2 * self.config.timeouts.discovery
        )

    def shard_of(self, prompt: bytes, problem: str) -> Shard:
        """Returns the shard that owns a problem."""
        return self._members.owner(prompt, problem)

    def _owner(self, session: Session) -> Shard:
        return self._members.owner(session.prompt, session.problem)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Replaces the shards. Sessions and responses whose problem moves go to its new owner."""
        with self._lock:
            first = self.shards[0]
            for shard in self._members.update(endpoints):
                shard.lose_stream()
            for session in self._sessions.values():
                former, owner = self._owners[session.number], self._owner(session)
                if owner is not former:
                    former.forget(session)
                    self._owners[session.number] = owner
                    owner.open(session)  # it begins to read the history
            self._commits.move()
            if first.contact.lost and not first.endpoint.address:
                for shard in self.shards:
                    shard.contact = first.contact.handed_on()
        log.info("HistoSpec: shards: %s", ", ".join(f"{e.name} at {e.address}" for e in endpoints))

    def looked(self) -> None:
        """Notes that the client has looked for shards. If it found any, it called `update` before."""
        self.looked_at = self._clock()
        if not self.shards[0].endpoint.address:
            self.unreachable(self.shards[0], grpc.StatusCode.UNAVAILABLE, "no shard was found there")
        self.changed()

    # ---- lines in the log about shards ----------------------------------------------------------------------------

    def answered(self, shard: Shard) -> None:
        """Notes that a shard has answered a call outside its stream; the caller logs it."""
        with self._lock:
            shard.contact.answered()

    def unreachable(self, shard: Shard, code: grpc.StatusCode, details: str) -> None:
        """Notes that a shard, asked outside its stream, does not answer or refuses this client."""
        with self._lock:
            if not self.closed:
                shard.unreachable(code, details, self._clock())
        self._write_log()

    def log_outage(self, shard: Shard, outage: Outage | None = None) -> None:
        """Logs why a shard does not answer, unless it answers by now.

        Args:
            shard: the shard.
            outage: the reason; None: the status that gRPC reported.
        """
        with self._lock:
            contact = shard.contact
            if not contact.lost or self.closed:
                return
            contact.mark_logged()
        log.warning("%s", outage or Outage.by_status(shard.where, contact.code, contact.details))

    def _write_log(self) -> None:
        """Logs the lines that wait, without the lock."""
        lines = self._shared.log_lines
        while lines:
            with contextlib.suppress(IndexError):  # another thread logs it
                lines.popleft()()

    # ---- sessions -------------------------------------------------------------------------------------------------

    def open(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[Tokens] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[int]:
        """See `DraftClient.open`."""
        quiet_grpc.refuse_after_fork()  # first: in a forked process a thread of the parent may hold the lock for ever
        arguments.listed("prompts", prompts, arguments.PROMPTS)
        each = partial(arguments.for_each, other="prompts", size=len(prompts))
        given = each("problems", problems, arguments.PROBLEMS)
        pieces = each("generated", [()] * len(prompts) if generated is None else generated, arguments.TOKEN_LISTS)
        numbers = each("seeds", seeds, arguments.SEEDS)
        texts = [arguments.token_bytes(f"prompts[{i}]", p, empty=False) for i, p in enumerate(prompts)]
        names = [arguments.problem_name(f"problems[{i}]", p) for i, p in enumerate(given)]
        begun = [arguments.token_bytes(f"generated[{i}]", g) for i, g in enumerate(pieces)]
        drawn = arguments.seed_numbers("seeds", numbers)
        with self._lock:
            opened = []
            for prompt, problem, text, seed in zip(texts, names, begun, drawn, strict=True):
                shard = self.shard_of(prompt, problem)
                session = Session(self._next, prompt, problem, text, seed)
                self._next += 1
                self._sessions[session.number] = session
                self._owners[session.number] = shard
                shard.open(session)
                opened.append(session.number)
            return opened

    def finish(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
        alternatives: Sequence[bytes | None] | None = None,
    ) -> None:
        """See `DraftClient.finish`."""
        quiet_grpc.refuse_after_fork()
        arguments.listed("sessions", sessions, arguments.SESSIONS)
        arguments.flag("commit", commit)
        count = len(sessions)
        with self._lock:
            chosen = find(self._sessions, sessions)
            epoch = [arguments.epoch_number(name, v) for name, v in arguments.each("epochs", epochs, count)]
            change = [arguments.change_count(name, v) for name, v in arguments.each("changes", changes, count)]
            reward = [arguments.reward_number(name, v) for name, v in arguments.each("rewards", rewards, count)]
            given = arguments.for_each("logprobs", logprobs, arguments.LOGPROBS, "sessions", count)
            scores = [
                arguments.float_bytes(f"logprobs[{i}]", score, session.length)
                for i, (score, session) in enumerate(zip(given, chosen, strict=True))
            ]
            packed = arguments.for_each("alternatives", alternatives, arguments.ALTERNATIVES, "sessions", count)
            others = [
                arguments.alternative_bytes(f"alternatives[{i}]", some, session.length)
                for i, (some, session) in enumerate(zip(packed, chosen, strict=True))
            ]
            for i, session in enumerate(chosen):
                del self._sessions[session.number]
                shard = self._owners.pop(session.number)
                if not (commit and session.generated):
                    shard.forget(session)
                    continue
                if self.recorder is not None:
                    self.recorder.keep(
                        session.prompt,
                        session.generated,
                        problem=session.problem,
                        epoch=epoch[i],
                        changes=change[i],
                        seed=session.seed,
                        reward=reward[i],
                    )
                shard.commit(Commit(session, epoch[i], reward[i], scores[i], change[i], others[i]))

    def too_old(self, shard: Shard, responses: int) -> None:
        """Counts ingested responses that a shard did not keep, because it keeps newer epochs of their problem."""
        with self._lock:
            shard.too_old(responses, self._clock())
        self._write_log()

    # ---- steps ----------------------------------------------------------------------------------------------------

    def send(
        self,
        sessions: Sequence[int],
        new_tokens: Sequence[Tokens],
        max_tokens: int = 16,
        verify_cost: float = DEFAULT_VERIFY_COST,
        *,
        verified: Sequence[int] | None = None,
        model_drafted: Sequence[int] | None = None,
        model_accepted: Sequence[int] | None = None,
    ) -> Pending:
        """See `DraftClient.send`. Leaves a message for every shard that may be asked."""
        quiet_grpc.refuse_after_fork()
        arguments.listed("sessions", sessions, arguments.SESSIONS)
        arguments.listed("new_tokens", new_tokens, arguments.TOKEN_LISTS)
        arguments.same_length("new_tokens", new_tokens, "sessions", len(sessions))
        budget = Budget(max_tokens, verify_cost).check()
        counts = report_counts(verified, model_drafted, model_accepted, len(sessions))
        flat, lengths = arguments.batch_bytes("new_tokens", new_tokens)
        with self._lock:
            chosen = find(self._sessions, sessions)
            step_input = StepInput(chosen, [s.length for s in chosen], lengths, flat, counts)
            start = 0
            for session, length in zip(chosen, lengths, strict=True):
                end = start + 4 * length
                session.generated += flat[start:end]
                session.length += length
                start = end
            now = self._clock()
            self._commits.losses.report()
            self._lose_silent(now)
            pending = Pending(len(chosen), now + self.config.timeouts.step)
            for shard, rows in self._split(chosen):
                shard.ask(step_input, rows, budget, now, pending)
        self._write_log()
        return pending

    def _split(self, chosen: list[Session]) -> Iterator[tuple[Shard, Sequence[int]]]:
        """Yields each shard that owns sessions of a step, with their rows."""
        if len(self.shards) == 1 and not self._stats.refused:
            if chosen:
                yield self.shards[0], range(len(chosen))
            return
        rows: dict[Shard, list[int]] = {}
        for row, session in enumerate(chosen):
            if not session.refused:
                rows.setdefault(self._owners[session.number], []).append(row)
        yield from rows.items()

    def collect(self, pending: Pending) -> list[Draft]:
        """Returns the drafts that have arrived, and empty ones for the others. Stops waiting for those."""
        if not pending.done:
            with self._lock:
                for shard, part in pending.parts:
                    if not part.done:
                        shard.late(part, self._clock())
            self._write_log()
        return pending.drafts()

    def abandon(self, pending: Pending) -> None:
        """Drops a step whose caller was cancelled. This says nothing about the server."""
        with self._lock:
            for shard, part in pending.parts:
                if shard.stream is not None:
                    shard.stream.give_up(part)

    def _lose_silent(self, now: float) -> None:
        """Gives up leaving shards that have fallen silent. They get no steps, so no late draft would show this."""
        for shard in self._members.leaving:
            shard.lose_if_silent(now)

    # ---- what waits to be sent ------------------------------------------------------------------------------------

    def flush(self) -> list[Shard]:
        """Leaves a message for every shard that has opens or closes waiting and may be asked.

        Returns:
            Those shards, the healthy ones that owe an acknowledgement, and those that are still to be found.
        """
        quiet_grpc.refuse_after_fork()
        with self._lock:
            now = self._clock()
            self._commits.losses.report()
            self._lose_silent(now)
            touched = self._members.leaving
            touched += [shard for shard in self.shards if shard.flush(now)]
        return touched

    def settled(self, shards: Sequence[Shard]) -> bool:
        """Returns whether each of these shards has all messages and has acknowledged every commit, or is lost."""
        with self._lock:
            return all(shard.settled for shard in shards)

    def overdue(self, shards: Sequence[Shard]) -> None:
        """Notes that a flush waited in vain for these shards."""
        with self._lock:
            for shard in shards:
                shard.overdue(self._clock())

    def stats(self) -> Stats:
        """Returns a copy of the counters."""
        quiet_grpc.refuse_after_fork()
        with self._lock:
            streams = [shard.stream for shard in self.shards + self._members.leaving if shard.stream]
            return replace(
                self._stats,
                pending_commits=self._commits.pending,
                reopened=self._stats.reopened + sum(stream.reopened for stream in streams),
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

    def reply(self, shard: Shard, stream: StreamState, response: pb.DraftResponse) -> None:
        """Takes a response that has arrived.

        Raises:
            GarbledReply: the response contradicts itself or what was sent; end the stream.
        """
        with self._lock:
            if shard.stream is not stream:
                return
            shard.reply(stream, response, self._clock())
        self._write_log()
        self.changed()

    def connected(self, shard: Shard, stream: StreamState, limits: ServerLimits) -> None:
        """Takes the limits of a shard that has just connected, before anything is written."""
        with self._lock:
            shard.connected(stream, limits, self._clock())
        self.changed()

    def end(self, shard: Shard, stream: StreamState, code: grpc.StatusCode, details: str) -> None:
        """Notes that a stream has ended, for any reason."""
        with self._lock:
            if shard.stream is not stream:
                return
            shard.end(stream, code, details, self._clock())
        self._write_log()
        self.changed()
