"""One Draft stream: applies its messages strictly in order, with one engine call per step.

The stream calls the engine on the event loop, not in a thread: the engine takes the same time either way, and the way
to a thread and back costs more than the little Python beside it would gain. Measured at 256 sessions per step on two
shared cores: p50 6.7 against 7.1 ms with one worker, 21 against 25 ms with three at once. Larger work is cut into
slices (`slices.py`); other streams run between them.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np
import structlog
from numpy.typing import NDArray

from histospec.native import TOO_LONG, UNKNOWN, Engine
from histospec.protocol.arrays import INT32
from histospec.server.errors import HistoSpecError, InvalidRequest, LimitExceeded, Unavailable
from histospec.server.history.history import History
from histospec.server.logs.lines import Throttle
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc import slices, wire
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.answers import Answer, Answers
from histospec.server.rpc.connections import peer_of
from histospec.server.rpc.encoded import Undecodable
from histospec.server.rpc.open_sessions import OpenSessions
from histospec.server.security.access import Permit
from histospec.server.settings.config import Config
from histospec.server.stores.interface import LAST_EPOCH
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)

# Share of the memory budget for running sessions, which eviction cannot free. Beyond it, streams with more sessions
# than average may open no more, so that the sessions of one stream cannot evict the history of all.
RUNNING_SHARE = 0.5


class DraftStream:
    """The stream of one client on this shard."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        metrics: Metrics,
        config: Config,
        permit: Permit,
        context: "grpc.aio.ServicerContext[Any, Any]",
        answering: Answering,
        sessions_each: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._history = history
        self._metrics = metrics
        self._config = config
        self._permit = permit
        self._rights = permit.check()  # version of the token's rights with which the open sessions were checked
        self._context = context
        self._sessions_each = sessions_each  # returns the average over all streams
        self._sessions = OpenSessions(engine, history)
        self._answers = Answers(context, history, metrics, answering, self._leave_when_idle)
        self._draining = False
        self._leaving = asyncio.Event()
        self._refused: HistoSpecError | None = None
        self._awaits = False
        self.peer = peer_of(context.peer())
        self._namespaces: set[str] = set()
        self._verify_costs = metrics.engine.verify_costs.open()
        self._bases: dict[str, int] = {}  # by namespace: epoch of the weights that the worker started with
        self._counts = dict.fromkeys(("messages", "steps", "late", "tokens", "drafted", "opened", "committed"), 0)

    async def run(self) -> None:
        """Serves the stream to its end. Raises the error that ends it early: a HistoSpecError, or cancellation."""
        started = time.perf_counter()
        peer = self._context.peer()
        outcome = "ok"
        reading = asyncio.ensure_future(self._read())
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise self._refused or Unavailable("the server is draining; connect again")
            await reading
            await self._answers.stored()
        except asyncio.CancelledError:
            outcome = "cut off" if self._draining else "left"
            raise
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self._metrics.engine.verify_costs.close(self._verify_costs)
            self._answers.stop()
            reading.cancel()
            leaving.cancel()
            if (more := THROTTLE.admits(outcome)) is not None:
                log.info(
                    "draft stream ended",
                    peer=peer,
                    outcome=outcome,
                    seconds=round(time.perf_counter() - started, 3),
                    namespaces=len(self._namespaces),
                    open_sessions=len(self._sessions),
                    **self._counts,
                    refused=self._answers.refused,
                    **more,
                )

    @property
    def sessions(self) -> int:
        """The number of sessions in the engine."""
        return len(self._sessions)

    def close(self) -> "asyncio.Task[None]":
        """Closes the sessions that are still open after the stream's end, in slices."""
        return self._sessions.forget_all()

    def drain(self) -> None:
        """Ends the stream as soon as it has no session and owes no answer."""
        self._draining = True
        self._leave_when_idle()

    def awaited(self) -> int | None:
        """Returns the number of the message that is awaited; None if none is."""
        return self._counts["messages"] if self._awaits else None

    def refuse(self, error: HistoSpecError) -> None:
        """Ends the stream with an error."""
        self._refused = error
        self._leaving.set()

    def forget(self, namespace: str) -> None:
        """Removes a dropped namespace: its epochs start again."""
        self._bases.pop(namespace, None)
        self._namespaces.discard(namespace)
        self._verify_costs.pop(namespace, None)

    def _leave_when_idle(self) -> None:
        if self._draining and not self._sessions and not self._answers.storing:
            self._leaving.set()

    async def _read(self) -> None:
        read = self._context.read
        while True:
            self._awaits = True
            request = await read()
            self._awaits = False
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            await self._apply(request)
            del request
            self._leave_when_idle()
            await self._answers.room()

    async def _apply(self, request: pb.DraftRequest | bytes | Undecodable) -> None:
        started = time.perf_counter()
        self._check_rights()
        pacer = slices.Pacer()
        message = await self._checked(request, pacer)
        self._check_late(message.step)
        commits = any(close.commit for close in message.closes)
        wanted = message.step is not None or any(close.commit or close.aborted is not None for close in message.closes)
        # A client that commits faster than the index accepts waits here; the server does not read its stream meanwhile.
        later = await self._history.refuses_commits() if commits else ""
        answer = self._answers.begin(message.sequence, started)
        rehearsal = message.step is not None and not message.step.sessions  # changes nothing and counts nowhere
        for opening in message.opens:
            await self._open_session(opening, answer)
            await pacer.after(opening.prompt.size + opening.generated.size + slices.SESSION_WORK)
        if message.step is not None:
            await self._step(message.step, answer, pacer)
        try:
            for close in message.closes:
                self._close_session(close, answer, later)
                await pacer.after(close.generated + slices.SESSION_WORK)
        except BaseException:
            if answer.commits:  # the index has them
                await self._answers.finish(answer, wanted)
            raise
        self._counts["messages"] += 1
        await self._answers.finish(answer, wanted, measured=not rehearsal)

    async def _checked(self, request: pb.DraftRequest | bytes | Undecodable, pacer: slices.Pacer) -> wire.Message:
        if isinstance(request, bytes):
            request, many = await slices.decode(request, pacer), True
        else:
            many = isinstance(request, pb.DraftRequest) and len(request.opens) + len(request.closes) > slices.MANY
        if many:
            message = await self._history.threads.run("draft", wire.message, request, self._config)
        else:
            message = wire.message(request, self._config)
        self._check_opens(message)
        return message

    def _check_rights(self) -> None:
        """Raises Unauthenticated or PermissionDenied if the token has lost a right that the open sessions need."""
        version = self._permit.check()
        if version != self._rights:
            for namespace in self._sessions.namespaces():
                self._permit.require("read", namespace)
            self._rights = version

    def _check_opens(self, message: wire.Message) -> None:
        for i, opening in enumerate(message.opens):
            self._permit.require("read", opening.problem.namespace)
            if opening.session in self._sessions:
                raise InvalidRequest(f"opens[{i}].session: {opening.session} is already open")

    def _check_late(self, step: wire.Step | None) -> None:
        """Rejects a late count that is larger than the number of steps not yet reported."""
        unreported = self._counts["steps"] - self._counts["late"]
        if step is not None and step.late > unreported:
            raise InvalidRequest(f"step.late: {step.late} are more than the {unreported} steps not reported so far")

    async def _open_session(self, opening: wire.Open, answer: Answer) -> None:
        refusal = opening.refusal
        if not refusal:
            try:
                self._history.namespaces.admit(opening.problem.namespace, self._permit.name)
                refusal = self._too_many(opening.problem.namespace)
            except (InvalidRequest, LimitExceeded) as error:
                refusal = str(error)
        if refusal:
            self._answers.refuse(answer, "open", opening.session, refusal)
            return
        problem = opening.problem
        prompt = self._history.aborted.find((problem.namespace, problem.name), problem.prompt)
        if prompt is not None:
            answer.continued[opening.session] = prompt
            self._metrics.aborted.labels("continued").inc()
            return
        await self._sessions.open(opening)
        self._namespaces.add(opening.problem.namespace)
        self._counts["opened"] += 1

    def _too_many(self, namespace: str) -> str:
        """Returns why the stream may open no more sessions in a namespace; empty if it may."""
        if len(self._sessions) >= self._config.max_sessions_per_stream:
            return f"opens: the stream is at its limit of {self._config.max_sessions_per_stream} open sessions"
        tenants = self._history.tenants
        tenant = self._history.namespaces.tenant(namespace)
        if refusal := tenants.refusal("sessions", tenant, 1):
            return f"opens: {refusal}"
        room = int(self._config.memory * RUNNING_SHARE)
        if self._engine.running_bytes() <= room:
            return ""
        over = tenants.has_more_sessions(tenant)
        if over or (over is None and len(self._sessions) > self._sessions_each()):
            who = "this stream" if over is None else f"tenant {tenant!r}"
            return f"opens: running sessions hold {room >> 20} MiB, half of --memory, and {who} more than its share"
        return ""

    async def _step(self, step: wire.Step, answer: Answer, pacer: slices.Pacer) -> None:
        """Appends and drafts for the whole batch, except for sessions that cannot continue."""
        if step.sessions and (origin := self._sessions.origin(step.sessions[0])):
            namespace = origin.problem.namespace  # a stream's sessions share it
            self._verify_costs[namespace] = step.verify_cost, self._metrics.engine.verify_costs.clock()
        ids = self._sessions.numbers(step.sessions)
        most = self._config.max_session_tokens
        asked = slices.StepRequest(
            ids, step.tokens, step.offsets, step.positions.astype(np.int64), most,
            step.max_tokens, step.verify_cost, step.report, step.runners_up,
        )  # fmt: skip
        rows = None  # of the step that the engine gets; None: all
        if step.tokens.size and (full := self._full(step)):
            new = np.diff(step.offsets)
            known = self._engine.lengths(ids) >= step.positions
            grows = known & (new > 0) & (step.positions + new <= most)
            self._give_up(step, np.flatnonzero(grows), full, answer)
            rows = np.flatnonzero(~grows)
            asked = asked.of(rows)
        started = time.perf_counter()
        try:
            drafts = await slices.step(self._engine, asked, pacer)
        except ValueError as error:  # the engine checks the report
            raise InvalidRequest(f"step.{error}") from None
        if step.sessions:
            self._metrics.draft_seconds.observe(time.perf_counter() - started)
        lengths = (drafts.offsets[1:] - drafts.offsets[:-1]).astype(INT32)
        if rows is not None:
            drafted, lengths = lengths, np.zeros(len(ids), INT32)
            lengths[rows] = drafted
        if drafts.outcomes.any():
            rows = np.arange(len(ids)) if rows is None else rows
            too_long = f"step: the session is over the limit of {most} tokens"
            self._give_up(step, rows[drafts.outcomes == TOO_LONG], too_long, answer)
            self._give_up(step, rows[drafts.outcomes == UNKNOWN], "", answer)
        answer.response.lengths = lengths.tobytes()
        answer.response.tokens = drafts.tokens.tobytes()
        answer.response.probs = drafts.probs.tobytes()
        if step.runners_up:
            answer.response.runner_up_tokens = drafts.runner_up_tokens.tobytes()
            answer.response.runner_up_probs = drafts.runner_up_probs.tobytes()
        self._counts["steps"] += bool(step.sessions)
        self._counts["late"] += step.late
        if step.late:
            self._metrics.late_steps.inc(step.late)
        self._counts["tokens"] += int(step.tokens.size)
        self._counts["drafted"] += int(drafts.tokens.size)

    def _full(self, step: wire.Step) -> str:
        """Returns why the sessions of this stream may not grow; empty if they may."""
        if self._engine.running_bytes() <= self._config.memory:
            return ""
        origin = self._sessions.origin(step.sessions[0])  # a stream's sessions share a namespace
        over = self._history.tenants.has_more_sessions(origin.tenant) if origin else None
        if over is False or (over is None and len(self._sessions) < self._sessions_each()):
            return ""
        return f"step: running sessions hold all of --memory, {self._config.memory >> 20} MiB"

    def _give_up(self, step: wire.Step, rows: NDArray[np.int64], reason: str, answer: Answer) -> None:
        """Closes the sessions in these rows of the step: as refused for `reason`, or without a reason as unknown."""
        refused = {refusal.session for refusal in answer.response.refusals}
        for session in (step.sessions[row] for row in rows.tolist()):
            self._sessions.forget(session)
            if session in refused:
                continue
            if reason:
                self._answers.refuse(answer, "step", session, reason)
            else:
                answer.unknown.append(session)

    def _close_session(self, close: wire.Close, answer: Answer, later: str) -> None:
        """Closes one session. If it commits, its response waits in the answer for the store.

        `later`: why nothing can be committed now; empty if it can.
        """
        if close.aborted is not None:
            (name, problem), aborted = close.aborted
            if self._permit.allows("write", name):
                self._history.aborted.add((name, problem), aborted)
                self._metrics.aborted.labels("aborted").inc()
        origin = self._sessions.origin(close.session)
        if origin is None or not close.commit or not close.generated:
            if not self._sessions.forget(close.session, close.generated) and close.commit:
                answer.unknown.append(close.session)
            return
        namespace = origin.problem.namespace
        refusal, again = later, True
        epoch = 0
        if not self._permit.allows("write", namespace):
            refusal, again = f"closes: the token has no right to write in namespace {namespace!r}", False
        elif not refusal:
            arrays = close.generated * INT32.itemsize + len(close.logprobs) + len(close.alternatives)
            refusal = self._history.store_refusal(namespace, origin.problem.size_with(arrays, responses=1))
        if not refusal:
            try:
                epoch = self._epoch(namespace, close)
            except InvalidRequest as error:  # of this response alone, so the stream goes on
                refusal, again = str(error), False
        if refusal:
            if self._sessions.forget(close.session, close.generated):
                self._answers.refuse(answer, "commit", close.session, refusal, later=again)
            else:
                answer.unknown.append(close.session)
        elif (commit := self._sessions.commit(close, epoch)) is not None:
            answer.commits.append(commit)
            self._counts["committed"] += 1
        else:
            answer.unknown.append(close.session)

    def _epoch(self, namespace: str, close: wire.Close) -> int:
        """Returns the epoch of a response. Raises InvalidRequest if it is too far ahead."""
        epochs = self._history.epochs
        if close.epoch is not None:
            epochs.check("closes.epoch", namespace, close.epoch)
            return close.epoch
        base = self._bases.setdefault(namespace, epochs.newest(namespace) - close.changes)
        return epochs.counted("closes.changes", namespace, min(base + close.changes, LAST_EPOCH))
