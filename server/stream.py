"""One Draft stream: its sessions, one engine call a step, and answers that may overtake each other.

Messages are applied strictly in the order they arrive. A message that commits is answered once the store has the
response; the messages behind it do not wait for that.

The engine is called on the event loop, not in a thread: a step is as long as the engine works either way, and the way
to a thread and back costs more than the little of Python beside it would gain. Measured at 256 sessions a step on two
shared cores: p50 6.7 against 7.1 ms with one worker, 21 against 25 ms with three at once.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import structlog
from numpy.typing import NDArray

from histospec.native import Engine
from histospec.server import wire
from histospec.server.access import Permit
from histospec.server.config import Config
from histospec.server.errors import InvalidRequest, LimitExceeded, StoreError, Unavailable
from histospec.server.history import History
from histospec.server.logs import Throttle
from histospec.server.metrics import Metrics
from histospec.server.store import LAST_EPOCH, Batch, Problem, Record
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)

OPENS_AT_ONCE = 64  # then the steps of other streams have their turn
# Of the memory budget, for what no eviction frees. Beyond it, streams with more sessions than others open no more, so
# that nobody's sessions drive out everybody's history.
RUNNING_SHARE = 0.5

Drafts = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float32]]


class _Origin(NamedTuple):
    """What a commit must know of its session."""

    problem: Problem
    seed: int | None


class DraftStream:
    """The sessions that one client keeps on this shard."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        metrics: Metrics,
        config: Config,
        permit: Permit,
        context: "grpc.aio.ServicerContext[Any, Any]",
        sessions_each: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._history = history
        self._metrics = metrics
        self._seconds = metrics.rpc_seconds.labels("Draft")
        self._config = config
        self._permit = permit
        self._context = context
        self._sessions_each = sessions_each  # of all streams, on average
        self._peer = context.peer()
        self._over = False  # gRPC frees the call behind the context then: touching it would crash the process
        self._ids: dict[int, int] = {}  # the client's session id -> the engine's
        self._origins: dict[int, _Origin] = {}  # by the client's id; needed once, at the commit
        self._writing = asyncio.Lock()
        self._storing: set[asyncio.Task[None]] = set()
        self._draining = False
        self._leaving = asyncio.Event()
        self._namespaces: set[str] = set()
        self._bases: dict[str, int] = {}  # by namespace: the epoch of the weights that the worker started with
        self._counts = dict.fromkeys(
            ("messages", "steps", "late", "tokens", "drafted", "opened", "committed", "refused"), 0
        )

    async def run(self) -> None:
        """Serves the stream to its end. Raises what ends it otherwise: a HistoSpecError, or cancellation."""
        started = time.perf_counter()
        outcome = "ok"
        reading = asyncio.ensure_future(self._read())
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise Unavailable("the server is draining; connect again")
            await reading
            if self._storing:
                await asyncio.wait(self._storing)
        except asyncio.CancelledError:
            outcome = "cut off" if self._draining else "left"
            raise
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self._over = True
            reading.cancel()
            leaving.cancel()
            open_sessions = len(self._ids)
            self._end()
            if (more := THROTTLE.admits(outcome)) is not None:
                log.info(
                    "draft stream ended",
                    peer=self._peer,
                    outcome=outcome,
                    seconds=round(time.perf_counter() - started, 3),
                    namespaces=len(self._namespaces),
                    open_sessions=open_sessions,
                    **self._counts,
                    **more,
                )

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._ids)

    def drain(self) -> None:
        """Ends the stream as soon as it holds no session and owes no answer."""
        self._draining = True
        self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        if self._draining and not self._ids and not self._storing:
            self._leaving.set()

    def _end(self) -> None:
        for session in self._ids.values():
            self._close(session)
        self._ids.clear()
        self._origins.clear()

    async def _read(self) -> None:
        read = self._context.read
        while (request := await read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            await self._apply(request)
            self._leave_when_idle()

    async def _apply(self, request: pb.DraftRequest) -> None:
        started = time.perf_counter()
        self._permit.check()
        message = wire.message(request, self._config)
        self._check_opens(message)
        self._check_late(message.step)
        response = pb.DraftResponse(sequence=message.sequence)
        unknown: list[int] = []
        for i, opening in enumerate(message.opens, 1):
            self._open(opening, response)
            if i % OPENS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if message.step is not None:
            self._step(message.step, response, unknown)
        commits = {}
        for close in message.closes:
            if batch := self._close_session(close, unknown, response):
                commits[close.session] = batch
        if unknown:
            response.unknown = np.array(unknown, wire.UINT64).tobytes()
        self._counts["messages"] += 1
        if commits:
            task = asyncio.ensure_future(self._store(commits, response, started))
            self._storing.add(task)
            task.add_done_callback(self._stored)
        elif message.step is not None or unknown or response.refusals or any(c.commit for c in message.closes):
            await self._answer(response, started)

    def _check_opens(self, message: wire.Message) -> None:
        for i, opening in enumerate(message.opens):
            self._permit.require("read", opening.problem.namespace)
            if opening.session in self._ids:
                raise InvalidRequest(f"opens[{i}].session: {opening.session} is open already")

    def _check_late(self, step: wire.Step | None) -> None:
        """A step is late once at most: nobody counts what never was."""
        unreported = self._counts["steps"] - self._counts["late"]
        if step is not None and step.late > unreported:
            raise InvalidRequest(f"step.late: {step.late} are more than the {unreported} steps not reported so far")

    def _open(self, opening: wire.Open, response: pb.DraftResponse) -> None:
        refusal = opening.refusal or self._too_many()
        if not refusal:
            try:
                self._history.admit(opening.problem.namespace)
            except LimitExceeded as error:
                refusal = str(error)
        if refusal:
            self._refuse(response, "open", opening.session, refusal)
            return
        problem = opening.problem
        number = self._engine.open(
            problem.namespace,
            opening.prompt,
            problem=problem.name or None,
            generated=opening.generated,
            seed=opening.seed,
        )
        self._ids[opening.session] = number
        # A later turn belongs, in the store as in the index, to the problem that its prompt began with.
        named = self._engine.prompt_length(number) * opening.prompt.itemsize
        # Its seed stays behind: there it would name what was drawn after the first prompt.
        seed = opening.seed if named == len(problem.prompt) else None
        problem = problem._replace(prompt=problem.prompt[:named])
        self._origins[opening.session] = _Origin(problem, seed)
        self._history.want(problem)
        self._namespaces.add(problem.namespace)
        self._counts["opened"] += 1

    def _refuse(self, response: pb.DraftResponse, what: str, session: int, reason: str, later: bool = False) -> None:
        response.refusals.add(session=session, reason=reason, later=later)
        self._metrics.refusals.labels(what).inc()
        self._counts["refused"] += 1

    def _too_many(self) -> str:
        """Why the stream may open no more sessions, or nothing."""
        if len(self._ids) >= self._config.max_sessions_per_stream:
            return f"opens: the stream has its limit of {self._config.max_sessions_per_stream} open sessions"
        room = int(self._config.memory * RUNNING_SHARE)
        if self._engine.running_bytes() > room and len(self._ids) > self._sessions_each():
            return (
                f"opens: running sessions hold {room >> 20} MiB, half of --memory, and this stream more than its part"
            )
        return ""

    def _step(self, step: wire.Step, response: pb.DraftResponse, unknown: list[int]) -> None:
        """Appends and drafts for the whole batch in one engine call, leaving out the sessions it cannot go on with."""
        if step.sessions and (origin := self._origins.get(step.sessions[0])):
            namespace = origin.problem.namespace  # a stream's sessions share it
            self._metrics.saw_verify_cost(namespace, step.verify_cost)
        find = self._ids.get
        ids = np.array([find(session, -1) for session in step.sessions], np.int64)
        held = self._engine.lengths(ids)
        new = step.offsets[1:] - step.offsets[:-1]
        known = (held >= 0) & (step.positions <= held)
        short = step.positions + new <= self._config.max_session_tokens
        fits = known & short
        if fits.all():
            tokens, offsets, probs = self._draft(ids, step.tokens, step.offsets, step.positions, step)
            lengths = offsets[1:] - offsets[:-1]
        else:
            offsets = np.concatenate(([0], np.cumsum(new[fits])))
            kept = step.tokens[np.repeat(fits, new)]
            tokens, offsets, probs = self._draft(ids[fits], kept, offsets, step.positions[fits], step)
            lengths = np.zeros(len(ids), np.int64)
            lengths[fits] = np.diff(offsets)
            self._give_up(step, known, short, response, unknown)
        response.lengths = lengths.astype(wire.INT32).tobytes()
        response.tokens = tokens.tobytes()
        response.probs = probs.tobytes()
        self._counts["steps"] += 1
        self._counts["late"] += step.late
        self._metrics.late_steps.inc(step.late)
        self._counts["tokens"] += int(step.tokens.size)
        self._counts["drafted"] += int(tokens.size)

    def _draft(
        self,
        ids: NDArray[np.int64],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int32],
        step: wire.Step,
    ) -> Drafts:
        with self._metrics.draft_seconds.time():
            drafts: Drafts = self._engine.step(
                ids,
                tokens,
                offsets,
                max_tokens=step.max_tokens,
                verify_cost=step.verify_cost,
                positions=positions.astype(np.int64),
                tail_weight=step.tail_weight,
            )
        return drafts

    def _give_up(
        self,
        step: wire.Step,
        known: NDArray[np.bool_],
        short: NDArray[np.bool_],
        response: pb.DraftResponse,
        unknown: list[int],
    ) -> None:
        """Lets go of the sessions that cannot go on, and says why: unknown here, or grown over the limit."""
        refused = {refusal.session for refusal in response.refusals}
        for i in np.flatnonzero(~(known & short)):
            session = step.sessions[i]
            self._forget(session)
            if not short[i]:
                limit = self._config.max_session_tokens
                self._refuse(response, "step", session, f"step: the session is over the limit of {limit} tokens")
            elif session not in refused:
                unknown.append(session)

    def _close_session(self, close: wire.Close, unknown: list[int], response: pb.DraftResponse) -> Batch | None:
        """Closes one session; returns the response to store, if it commits one."""
        session, origin = self._ids.get(close.session), self._origins.get(close.session)
        if session is None or origin is None or not close.commit:
            if close.commit:
                unknown.append(close.session)
            self._forget(close.session)
            return None
        if self._engine.lengths(np.array([session], np.int64))[0] != close.generated:
            unknown.append(close.session)
            self._forget(close.session)
            return None
        if not close.generated:
            self._forget(close.session)
            return None
        problem = origin.problem
        if not self._permit.allows("write", problem.namespace):
            reason = f"closes: the token has no right to write in namespace {problem.namespace!r}"
            self._refuse(response, "commit", close.session, reason)
            self._forget(close.session)
            return None
        epoch = self._epoch(problem.namespace, close)
        tokens = self._engine.generated(session).tobytes()
        batch = Batch(problem, [Record(tokens, epoch, close.reward, close.logprobs, seed=origin.seed)])
        self._history.saw(batch)
        self._engine.close(session, commit=True, epoch=epoch)
        del self._ids[close.session], self._origins[close.session]
        self._counts["committed"] += 1
        return batch

    def _epoch(self, namespace: str, close: wire.Close) -> int:
        if close.epoch is not None:
            self._history.name_epochs(namespace)
            return close.epoch
        base = self._bases.setdefault(namespace, self._history.newest_epoch(namespace) - close.changes)
        return self._history.counted_epoch(namespace, min(base + close.changes, LAST_EPOCH))

    def _forget(self, session: int) -> None:
        held = self._ids.pop(session, None)
        self._origins.pop(session, None)
        if held is not None:
            self._close(held)

    def _close(self, session: int) -> None:
        try:
            self._engine.close(session, commit=False)
        except KeyError:
            log.warning("session was gone", session=session)

    async def _store(self, commits: Mapping[int, Batch], response: pb.DraftResponse, started: float) -> None:
        """Answers once the store has the responses; says so where it could not take them."""
        outcomes = await asyncio.gather(
            *(self._history.store(batch) for batch in commits.values()), return_exceptions=True
        )
        for session, outcome in zip(commits, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                self._refuse(response, "commit", session, str(outcome), later=True)
            elif outcome is not None:
                raise outcome
        await self._answer(response, started)

    def _stored(self, task: "asyncio.Task[None]") -> None:
        self._storing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.info("answer not delivered", peer=self._peer, reason=repr(task.exception()))
        self._leave_when_idle()

    async def _answer(self, response: pb.DraftResponse, started: float) -> None:
        self._seconds.observe(time.perf_counter() - started)  # before the client can ask for it
        async with self._writing:
            if not self._over:
                await self._context.write(response)
