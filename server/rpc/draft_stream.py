"""One Draft stream: its sessions, one engine call a step, and answers that may overtake each other.

Messages are applied strictly in the order they arrive. A message that commits is answered once the store has the
response; the messages behind it do not wait for that.

The engine is called on the event loop, not in a thread: a step is as long as the engine works either way, and the way
to a thread and back costs more than the little of Python beside it would gain. Measured at 256 sessions a step on two
shared cores: p50 6.7 against 7.1 ms with one worker, 21 against 25 ms with three at once. What is larger is done in
slices (`slices.py`), between which other streams have their turn.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import structlog
from numpy.typing import NDArray

from histospec.native import TOO_LONG, UNKNOWN, Engine
from histospec.protocol.arrays import INT32, UINT64
from histospec.server.config import Config
from histospec.server.errors import InvalidRequest, LimitExceeded, StoreError, Unavailable
from histospec.server.history.back_pressure import CROWDED
from histospec.server.history.history import History
from histospec.server.logs.lines import Throttle
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc import slices, wire
from histospec.server.security.access import Permit
from histospec.server.stores.interface import LAST_EPOCH, Batch, Problem, Record
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

THROTTLE = Throttle(lines=200)

# What one stream may have waiting for the store, or for its client to read the answers: beyond either, it is not read.
OWED_ANSWERS = 1024
OWED_BYTES = 64 << 20

# Of the memory budget, for what no eviction frees. Beyond it, streams with more sessions than others open no more, so
# that nobody's sessions drive out everybody's history.
RUNNING_SHARE = 0.5
# Tokens of a session that is opened in a thread: the event loop turns meanwhile.
LONG_OPEN = slices.TOKENS


class _Origin(NamedTuple):
    """What a commit must know of its session."""

    problem: Problem
    seed: int | None
    life: object  # of its namespace, see History.store


class _Commit(NamedTuple):
    """What a closed session leaves for the store."""

    batch: Batch
    life: object


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
        self._rights = permit.check()  # the version of the token's rights in which the open sessions were looked at
        self._context = context
        self._sessions_each = sessions_each  # of all streams, on average
        self._peer = context.peer()
        self._over = False  # gRPC frees the call behind the context then: touching it would crash the process
        self._ids: dict[int, int] = {}  # the client's session id -> the engine's
        self._origins: dict[int, _Origin] = {}  # by the client's id; needed once, at the commit
        self._writing = asyncio.Lock()
        self._storing: set[asyncio.Task[None]] = set()
        self._owed_bytes = 0  # of responses that wait for the store, and of answers that wait to be written
        self._paid = asyncio.Event()
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
            self._ending = asyncio.ensure_future(slices.close(list(self._ids.values()), self._close))
            self._ids.clear()
            self._origins.clear()
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

    def forget(self, namespace: str) -> None:
        """Forgets a namespace that was dropped: its epochs begin anew."""
        self._bases.pop(namespace, None)
        self._namespaces.discard(namespace)

    def _leave_when_idle(self) -> None:
        if self._draining and not self._ids and not self._storing:
            self._leaving.set()

    async def _read(self) -> None:
        read = self._context.read
        while (request := await read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            await self._apply(request)
            del request
            self._leave_when_idle()
            while len(self._storing) >= OWED_ANSWERS or self._owed_bytes > OWED_BYTES:
                self._paid.clear()
                await self._paid.wait()

    async def _apply(self, request: pb.DraftRequest | bytes | wire.Undecodable) -> None:
        started = time.perf_counter()
        self._check_rights()
        turns = slices.Turns()
        if isinstance(request, bytes):
            decoded = await slices.decode(request, turns)
            message = await asyncio.to_thread(wire.message, decoded, self._config)
        else:
            message = wire.message(request, self._config)
        self._check_opens(message)
        self._check_late(message.step)
        response = pb.DraftResponse(sequence=message.sequence)
        unknown: list[int] = []
        # Who commits faster than the index takes it waits here, and is not read meanwhile.
        crowded = any(close.commit for close in message.closes) and not await self._history.back_pressure.room()
        for opening in message.opens:
            await self._open(opening, response)
            await turns.after(opening.prompt.size + opening.generated.size + slices.SESSION_WORK)
        if message.step is not None:
            await self._step(message.step, response, unknown, turns)
        commits = {}
        for close in message.closes:
            if commit := self._close_session(close, unknown, response, crowded):
                commits[close.session] = commit
            await turns.after(close.generated + slices.SESSION_WORK)
        if unknown:
            response.unknown = np.array(unknown, UINT64).tobytes()
        self._counts["messages"] += 1
        if commits:
            task = asyncio.ensure_future(self._store(commits, response, started))
            self._storing.add(task)
            task.add_done_callback(self._stored)
        elif message.step is not None or unknown or response.refusals or any(c.commit for c in message.closes):
            await self._answer(response, started)

    def _check_rights(self) -> None:
        """Raises Unauthenticated or PermissionDenied where the token has lost what the open sessions need."""
        version = self._permit.check()
        if version != self._rights:
            for namespace in {origin.problem.namespace for origin in self._origins.values()}:
                self._permit.require("read", namespace)
            self._rights = version

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

    async def _open(self, opening: wire.Open, response: pb.DraftResponse) -> None:
        refusal = opening.refusal or self._too_many()
        if not refusal:
            try:
                self._history.namespaces.admit(opening.problem.namespace)
            except LimitExceeded as error:
                refusal = str(error)
        if refusal:
            self._refuse(response, "open", opening.session, refusal)
            return
        problem = opening.problem
        number = await self._open_in_engine(opening)
        self._ids[opening.session] = number
        # A later turn belongs, in the store as in the index, to the problem that its prompt began with.
        named = self._engine.prompt_length(number) * opening.prompt.itemsize
        # Its seed stays behind: there it would name what was drawn after the first prompt.
        seed = opening.seed if named == len(problem.prompt) else None
        problem = problem._replace(prompt=problem.prompt[:named])
        self._origins[opening.session] = _Origin(problem, seed, self._history.life(problem.namespace))
        self._history.want(problem)
        self._namespaces.add(problem.namespace)
        self._counts["opened"] += 1

    async def _open_in_engine(self, opening: wire.Open) -> int:
        open_session = functools.partial(
            self._engine.open,
            opening.problem.namespace,
            opening.prompt,
            problem=opening.problem.name or None,
            generated=opening.generated,
            seed=opening.seed,
        )
        if opening.prompt.size + opening.generated.size <= LONG_OPEN:
            return open_session()
        opened = asyncio.ensure_future(asyncio.to_thread(open_session))
        try:
            return await asyncio.shield(opened)
        except asyncio.CancelledError:  # the stream is over, but the thread goes on
            opened.add_done_callback(lambda done: self._close(done.result()))
            raise

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

    async def _step(self, step: wire.Step, response: pb.DraftResponse, unknown: list[int], turns: slices.Turns) -> None:
        """Appends and drafts for the whole batch, leaving out the sessions it cannot go on with."""
        if step.sessions and (origin := self._origins.get(step.sessions[0])):
            namespace = origin.problem.namespace  # a stream's sessions share it
            self._metrics.engine.saw_verify_cost(namespace, step.verify_cost)
        ids = np.array(list(map(self._ids.get, step.sessions, repeat(-1))), np.int64)
        most = self._config.max_session_tokens
        asked = slices.Asked(
            ids, step.tokens, step.offsets, step.positions.astype(np.int64), most,
            step.max_tokens, step.verify_cost,
        )  # fmt: skip
        lengths = np.zeros(len(ids), np.int64)
        rows = np.arange(len(ids))
        if step.tokens.size and (full := self._full()):
            new = np.diff(step.offsets)
            known = self._engine.lengths(ids) >= step.positions
            grows = known & (new > 0) & (step.positions + new <= most)
            self._give_up(step, rows[grows], full, response, unknown)
            rows = rows[~grows]
            asked = asked.of(rows)
        with self._metrics.draft_seconds.time():
            drafts = await slices.step(self._engine, asked, turns)
        lengths[rows] = np.diff(drafts.offsets)
        if drafts.outcomes.any():
            too_long = f"step: the session is over the limit of {most} tokens"
            self._give_up(step, rows[drafts.outcomes == TOO_LONG], too_long, response, unknown)
            self._give_up(step, rows[drafts.outcomes == UNKNOWN], "", response, unknown)
        response.lengths = lengths.astype(INT32).tobytes()
        response.tokens = drafts.tokens.tobytes()
        response.probs = drafts.probs.tobytes()
        self._counts["steps"] += 1
        self._counts["late"] += step.late
        self._metrics.late_steps.inc(step.late)
        self._counts["tokens"] += int(step.tokens.size)
        self._counts["drafted"] += int(drafts.tokens.size)

    def _full(self) -> str:
        """Why the sessions of this stream may not grow, or nothing."""
        if self._engine.running_bytes() <= self._config.memory or len(self._ids) < self._sessions_each():
            return ""
        return f"step: running sessions hold all of --memory, {self._config.memory >> 20} MiB"

    def _give_up(
        self,
        step: wire.Step,
        rows: NDArray[np.int64],
        reason: str,
        response: pb.DraftResponse,
        unknown: list[int],
    ) -> None:
        """Lets go of the sessions in these rows of the step: refused for a reason, or without one, unknown here."""
        refused = {refusal.session for refusal in response.refusals}
        for session in (step.sessions[row] for row in rows.tolist()):
            self._forget(session)
            if session in refused:
                continue
            if reason:
                self._refuse(response, "step", session, reason)
            else:
                unknown.append(session)

    def _close_session(
        self, close: wire.Close, unknown: list[int], response: pb.DraftResponse, crowded: bool
    ) -> _Commit | None:
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
        if crowded:
            self._refuse(response, "commit", close.session, CROWDED, later=True)
            self._forget(close.session)
            return None
        epoch = self._epoch(problem.namespace, close)
        tokens = self._engine.generated(session).tobytes()
        batch = Batch(problem, [Record(tokens, epoch, close.reward, close.logprobs, seed=origin.seed)])
        self._history.epochs.saw(batch)
        self._engine.close(session, commit=True, epoch=epoch)
        del self._ids[close.session], self._origins[close.session]
        self._counts["committed"] += 1
        return _Commit(batch, origin.life)

    def _epoch(self, namespace: str, close: wire.Close) -> int:
        if close.epoch is not None:
            self._history.epochs.give(namespace)
            return close.epoch
        base = self._bases.setdefault(namespace, self._history.epochs.newest(namespace) - close.changes)
        return self._history.epochs.counted(namespace, min(base + close.changes, LAST_EPOCH))

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

    async def _store(self, commits: dict[int, _Commit], response: pb.DraftResponse, started: float) -> None:
        """Answers once the store has the responses; says so where it could not take them."""
        size = sum(record.size for commit in commits.values() for record in commit.batch.records)
        self._owe(size)
        try:
            outcomes = await asyncio.gather(
                *(self._history.store(*commit) for commit in commits.values()), return_exceptions=True
            )
        finally:
            self._owe(-size)
        for session, outcome in zip(commits, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                self._refuse(response, "commit", session, str(outcome), later=True)
            elif outcome is not None:
                raise outcome
        commits.clear()  # the store has them: an answer that waits to be read holds no response
        size = response.ByteSize()
        self._owe(size)
        try:
            await self._answer(response, started)
        finally:
            self._owe(-size)

    def _owe(self, size: int) -> None:
        self._owed_bytes += size
        if size < 0:
            self._paid.set()

    def _stored(self, task: "asyncio.Task[None]") -> None:
        self._storing.discard(task)
        self._paid.set()
        if not task.cancelled() and task.exception() is not None:
            log.info("answer not delivered", peer=self._peer, reason=repr(task.exception()))
        self._leave_when_idle()

    async def _answer(self, response: pb.DraftResponse, started: float) -> None:
        self._seconds.observe(time.perf_counter() - started)  # before the client can ask for it
        async with self._writing:
            if not self._over:
                await self._context.write(response)
