"""The client without its network: open sessions, the steps that callers take, and the shard that owns each session.

Both clients (`aio.py` for asyncio, `sync.py` for threads) drive this one object. It never waits and never does I/O:
`send` and `flush` leave messages in the outboxes of streams, and a `Stream` of the transport carries them. It is
thread-safe: every public method takes the one lock, for microseconds.

A step enters it twice: `send`, and `reply` with the response. `collect` takes the lock only for a late step.

A signal handler may raise KeyboardInterrupt between any two bytecodes of the main thread, so also in the middle of a
change. The next method that takes the lock then mends the state. What is true is kept such that an interrupt cannot
damage it: the open sessions with their tokens, and the finished responses. All the rest follows from that: streams end,
sessions open again on the next ones, and responses that the server has not acknowledged are sent again.
"""

from __future__ import annotations  # so that help() names types as they are written here

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments, quiet_grpc
from histospec.client.config import DISCOVER, Config, Endpoint
from histospec.client.core.commits import Commit, Commits, finished
from histospec.client.core.membership import Membership
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.open_sessions import OpenSessions
from histospec.client.core.outage_log import Outage
from histospec.client.core.session import Appending, Session, find, prepare
from histospec.client.core.shard import Shard
from histospec.client.core.shared import Shared
from histospec.client.core.step import Budget, GarbledReply, Pending, StepInput, report_counts
from histospec.client.core.stream_state import StreamState
from histospec.client.errors import HistoSpecError
from histospec.client.recorder import recorder
from histospec.client.values import Stats, Tokens
from histospec.protocol.costs import DEFAULT_VERIFY_COST
from histospec.v1 import draft_pb2 as pb

log = logging.getLogger("histospec.client")

P = ParamSpec("P")
T = TypeVar("T")


def _locked(method: Callable[Concatenate[Core, P], T]) -> Callable[Concatenate[Core, P], T]:
    """Runs a method of the core under its lock, after mending what an interrupt has left in the middle; then logs."""

    @wraps(method)
    def locked(self: Core, *args: P.args, **kwargs: P.kwargs) -> T:
        quiet_grpc.refuse_after_fork()  # first: in a forked process a thread of the parent may hold the lock for ever
        with self._lock:
            if self._interrupted:
                self._mend()
            self._interrupted = True
            try:
                result = method(self, *args, **kwargs)
            except (ValueError, TypeError, HistoSpecError, GarbledReply):  # the method's own, not of a signal handler
                self._interrupted = False
                raise
            self._interrupted = False
        if self._shared.lines:
            self._shared.write_log()
        return result

    return locked  # type: ignore[return-value]  # `wraps` names the first argument


class Core:
    """The state of a client.

    Args:
        config: the configuration.
        changed: called by the transport, without the lock, after it has told the core of an arrival or an end.
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
        self._open = OpenSessions(config.namespace, self._owner, clock)
        self._numbers = itertools.count(1)
        self._appending = Appending()
        self._ending: tuple[list[Session], list[Commit]] = [], []
        """The sessions that `finish` is ending, and the responses of these that it is going to keep."""
        self._stats = Stats()
        self._commits = Commits(config.limits, self._stats, lambda session: self._owner(session).queue)
        self._shared = Shared(
            config, self._stats, self._open.by_number, self._commits, self._open.move, lambda shard: self.explain(shard)
        )
        self._members = Membership(self._shared)
        self._lock = threading.Lock()
        self._interrupted = False
        """Whether a method has begun to change the state and did not end."""

    @property
    def closed(self) -> bool:
        """Whether the client sends nothing any more."""
        return self._shared.closed

    @property
    def unacknowledged(self) -> int:
        """How many finished responses no shard has acknowledged yet. Takes no lock: the garbage collector may ask."""
        return self._commits.pending

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
            f"breakers={breakers} sessions={len(self._open.by_number)} pending_commits={self._commits.pending}{state}"
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

    @_locked
    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Replaces the shards. Sessions and responses whose problem moves go to its new owner."""
        first = self.shards[0]
        for shard in self._members.update(endpoints):
            shard.lose_stream()
        self._open.move_all()
        self._commits.move()
        if first.contact.lost and not first.endpoint.address:
            for shard in self.shards:
                shard.contact = first.contact.handed_on()
        named = ", ".join(f"{e.name} at {e.address}" for e in endpoints)
        self._shared.inform("HistoSpec: shards: %s", named)

    def looked(self) -> None:
        """Notes that the client has looked for shards. If it found any, it called `update` before."""
        self.looked_at = self._clock()
        if not self.shards[0].endpoint.address:
            self.unreachable(self.shards[0], grpc.StatusCode.UNAVAILABLE, "no shard was found there")
        self.changed()

    # ---- lines in the log about shards ----------------------------------------------------------------------------

    @_locked
    def answered(self, shard: Shard) -> None:
        """Notes that a shard has answered a call outside its stream; the caller logs it."""
        shard.contact.answered()

    @_locked
    def unreachable(self, shard: Shard, code: grpc.StatusCode, details: str) -> None:
        """Notes that a shard, asked outside its stream, does not answer or refuses this client."""
        if not self.closed:
            shard.unreachable(code, details, self._clock())

    @_locked
    def log_outage(self, shard: Shard, outage: Outage | None = None) -> None:
        """Logs why a shard does not answer, unless it answers by now or the end of the client has logged it.

        Args:
            shard: the shard.
            outage: the reason; None: the status that gRPC reported.
        """
        contact = shard.contact
        if contact.lost and contact.line_due and not self.closed:
            contact.mark_logged()
            self._shared.warn("%s", outage or contact.outage(shard.where))

    # ---- sessions -------------------------------------------------------------------------------------------------

    def open(
        self,
        prompts: Sequence[Tokens],
        problems: Sequence[str | None] | None = None,
        generated: Sequence[Tokens] | None = None,
        seeds: Sequence[int | None] | None = None,
        position_noise: bool = False,
    ) -> list[int]:
        """See `DraftClient.open`."""
        sessions = self.prepare(prompts, problems, generated, seeds, position_noise)
        self.begin(sessions)
        return [session.number for session in sessions]

    def prepare(self, *args: Any, **kwargs: Any) -> list[Session]:
        """Returns sessions for the arguments of `open`; `begin` opens them. Raises ValueError."""
        quiet_grpc.refuse_after_fork()
        return prepare(self._appending, self._numbers, *args, **kwargs)

    @_locked
    def begin(self, sessions: Sequence[Session]) -> None:
        """Opens sessions that `prepare` returned."""
        self._open.begin(sessions)

    @_locked
    def continues(self, prompt: Tokens) -> bool:
        """See `DraftClient.continues`."""
        return self._open.continues(arguments.token_bytes("prompt", prompt, empty=False))

    @_locked
    def take_back(self, sessions: Sequence[Session]) -> None:
        """Closes sessions whose `begin` an interrupt has ended: no caller knows them."""
        self._open.end(sessions, ())

    @_locked
    def finish(
        self,
        sessions: Sequence[int],
        commit: bool = True,
        epochs: int | Sequence[int | None] | None = None,
        rewards: float | Sequence[float | None] | None = None,
        logprobs: Sequence[Any] | None = None,
        changes: int | Sequence[int] | None = None,
        alternatives: Sequence[bytes | None] | None = None,
        aborted: bool = False,
    ) -> None:
        """See `DraftClient.finish`."""
        arguments.listed("sessions", sessions, arguments.SESSIONS)
        arguments.flag("commit", commit)
        arguments.flag("aborted", aborted)
        if commit and aborted:
            raise ValueError("aborted: responses that may be continued are not complete; give commit=False")
        chosen = find(self._open.by_number, sessions)
        responses = finished(chosen, epochs, rewards, logprobs, changes, alternatives)
        commits = [c for c in responses if commit and c.session.generated]
        self._ending = chosen, [c for c in commits if not c.session.refused]
        if self.recorder is not None:
            for c in commits:
                self.recorder.keep(
                    c.session.prompt,
                    c.session.generated,
                    problem=c.session.problem,
                    epoch=c.epoch,
                    changes=c.changes,
                    seed=c.session.seed,
                    reward=c.reward,
                )
        if aborted:
            self._open.abort(chosen, self.shards)
        self._open.end(chosen, commits)
        self._ending = [], []

    def _mend(self) -> None:
        """Makes the state whole again after an interrupt in the middle of any change. May be interrupted itself."""
        self._appending.complete()
        sessions, commits = self._ending
        for session in sessions:
            self._open.by_number.pop(session.number, None)
        for shard in self.shards + self._members.known_leaving:
            shard.renew()
        self._commits.recount(commits)
        self._ending = [], []
        self._open.renew()

    @_locked
    def lose_streams(self) -> None:
        """Ends all streams: an interrupt has ended the loop that carried their messages."""
        for shard in self.shards + self._members.leaving:
            shard.lose_stream()

    def too_old(self, shard: Shard, responses: int) -> None:
        """Counts ingested responses that a shard did not keep, because it keeps newer epochs of their problem."""
        with self._lock:
            shard.too_old(responses, self._clock())
        self._shared.write_log()

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
        runners_up: bool = False,
    ) -> Pending:
        """See `DraftClient.send`. Leaves a message for every shard that may be asked."""
        arguments.listed("sessions", sessions, arguments.SESSIONS)
        arguments.listed("new_tokens", new_tokens, arguments.TOKEN_LISTS)
        arguments.same_length("new_tokens", new_tokens, "sessions", len(sessions))
        budget = Budget(max_tokens, verify_cost, bool(runners_up)).check()
        counts = report_counts(verified, model_drafted, model_accepted, len(sessions))
        flat, lengths = arguments.batch_bytes("new_tokens", new_tokens)  # may call the caller's code: without the lock
        return self._send(sessions, flat, lengths, counts, budget)

    @_locked
    def _send(
        self,
        sessions: Sequence[int],
        flat: bytes,
        lengths: list[int],
        counts: NDArray[np.int32] | None,
        budget: Budget,
    ) -> Pending:
        chosen = find(self._open.by_number, sessions)
        parts: list[tuple[Shard | None, Sequence[int]]] = [(self.shards[0], range(len(chosen)))] if chosen else []
        if len(self.shards) > 1 or self._stats.refused:
            parts = list(self._open.by_shard(chosen).items())
            order = [row for _, rows in parts for row in rows]
            ends = itertools.accumulate(lengths, initial=0)
            texts = [flat[4 * start : 4 * end] for start, end in itertools.pairwise(ends)]
            chosen, lengths = [chosen[row] for row in order], [lengths[row] for row in order]
            flat, counts = b"".join([texts[row] for row in order]), None if counts is None else counts[order]
        step = StepInput(chosen, self._appending.append(chosen, lengths, flat), lengths, flat, counts)
        now = self._clock()
        self._commits.losses.report()
        self._lose_silent(now)
        pending = Pending(len(chosen), now + self.config.timeouts.step)
        for (shard, rows), mine in zip(parts, step.split([len(rows) for _, rows in parts]), strict=True):
            if shard is not None:
                shard.ask(mine, rows, budget, now, pending)
        return pending

    def end_wait(self, pending: Pending) -> None:
        """Stops waiting for drafts that have not arrived: they are late."""
        if not pending.done:
            self._late(pending)

    @_locked
    def _late(self, pending: Pending) -> None:
        for shard, part in pending.parts:
            if not part.done:
                shard.late(part, self._clock())

    @_locked
    def abandon(self, pending: Pending) -> None:
        """Drops a step whose caller was cancelled. This says nothing about the server."""
        for shard, part in pending.parts:
            if shard.stream is not None:
                shard.stream.give_up(part)

    @_locked
    def rehearse(self) -> list[Shard]:
        """Leaves an empty step for every shard that is healthy and owes nothing. Returns these shards.

        Also does what the last step has put off.
        """
        self._appending.copy()
        return [shard for shard in self.shards if shard.rehearse()]

    def rehearsing(self, shards: Sequence[Shard]) -> bool:
        """Returns whether one of these shards still owes the answer to an empty step. Takes no lock."""
        return any(stream.rehearsal for shard in shards if (stream := shard.stream) is not None)

    def _lose_silent(self, now: float) -> None:
        """Gives up leaving shards that have fallen silent. They get no steps, so no late draft would show this."""
        for shard in self._members.leaving:
            shard.lose_if_silent(now)

    # ---- what waits to be sent ------------------------------------------------------------------------------------

    @_locked
    def flush(self) -> list[Shard]:
        """Leaves a message for every shard that has opens or closes waiting and may be asked.

        Returns:
            Those shards, the healthy ones that owe an acknowledgement, and those that are still to be found.
        """
        now = self._clock()
        self._commits.losses.report()
        self._lose_silent(now)
        touched = self._members.leaving
        touched += [shard for shard in self.shards if shard.flush(now)]
        return touched

    @_locked
    def settled(self, shards: Sequence[Shard]) -> bool:
        """Returns whether each shard has all messages and has acknowledged every commit and abort, or is lost."""
        return all(shard.settled for shard in shards)

    @_locked
    def overdue(self, shards: Sequence[Shard]) -> None:
        """Notes that a flush waited in vain for these shards."""
        for shard in shards:
            shard.overdue(self._clock())

    @_locked
    def stats(self) -> Stats:
        """Returns a copy of the counters."""
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

    @_locked
    def lose(self, shard: Shard, responses: int, tokens: int, reason: str, away: bool) -> None:
        """Logs, at most once a minute, that a shard did not store responses without sessions, perhaps as it is away."""
        self._commits.losses.note(shard.name, tokens, reason, responses)
        if away:
            shard.contact.mark_logged()

    @_locked
    def report_end(self) -> None:
        """Logs, because the client ends, which dropped responses and which silent shards are not logged yet."""
        self._commits.losses.report(all_of_them=True)
        for shard in self.shards:
            shard.end_of_client()

    # ---- what the streams report ----------------------------------------------------------------------------------

    @_locked
    def reply(self, shard: Shard, stream: StreamState, response: pb.DraftResponse) -> None:
        """Takes a response that has arrived.

        Raises:
            GarbledReply: the response contradicts itself or what was sent; end the stream.
        """
        if shard.stream is stream:
            shard.reply(stream, response, self._clock())

    @_locked
    def connected(self, shard: Shard, stream: StreamState, limits: ServerLimits) -> None:
        """Takes the limits of a shard that has just connected, before anything is written."""
        shard.connected(stream, limits, self._clock())

    @_locked
    def end(self, shard: Shard, stream: StreamState, code: grpc.StatusCode, details: str) -> None:
        """Notes that a stream has ended, for any reason."""
        if shard.stream is stream:
            shard.end(stream, code, details, self._clock())
