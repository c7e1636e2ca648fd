"""What one Draft stream owes: answers to its client, and before some of them responses to the store.

A message that commits is answered once the store has the response; the messages behind it do not wait for that. What is
owed is bounded: beyond the bound, the stream is not read.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import structlog

from histospec.protocol.arrays import UINT64
from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.observability.metrics import Metrics
from histospec.server.stores.interface import ResponseBatch, total_size
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

# What one stream may have waiting for the store, or for its client to read the answers.
OWED_ANSWERS = 1024
OWED_BYTES = 64 << 20


class Commit(NamedTuple):
    """The response that a closed session leaves for the store."""

    session: int
    batch: ResponseBatch
    life: object
    """Of its namespace, see History.store."""


class Answer(NamedTuple):
    """The answer to one message, while the message is applied."""

    response: pb.DraftResponse
    unknown: list[int]
    """Sessions that the message names and the stream does not have."""
    commits: list[Commit]
    started: float
    """When the message was received, by `time.perf_counter`."""


class Answers:
    """The answers of one stream, which may overtake each other. Lives on the event loop.

    Args:
        context: of the call; written to until `stop`.
        history: stores what is committed.
        metrics: counts refusals, measures the time to each answer.
        paid: called whenever an answer that waited for the store is delivered or lost.

    """

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        history: History,
        metrics: Metrics,
        paid: Callable[[], None],
    ) -> None:
        self._context = context
        self._history = history
        self._seconds = metrics.rpc_seconds.labels("Draft")
        self._refusals = metrics.refusals
        self._paid = paid
        self._peer = context.peer()
        self._over = False  # gRPC frees the call behind the context then: touching it would crash the process
        self._writing = asyncio.Lock()
        self._storing: set[asyncio.Task[None]] = set()
        self._owed_bytes = 0  # of responses that wait for the store, and of answers that wait to be written
        self._changed = asyncio.Event()
        self.refused = 0
        """How many sessions were refused something."""

    @property
    def storing(self) -> bool:
        """Whether responses wait for the store, or their answers for the client."""
        return bool(self._storing)

    async def room(self) -> None:
        """Waits while too much is owed."""
        while len(self._storing) >= OWED_ANSWERS or self._owed_bytes > OWED_BYTES:
            self._changed.clear()
            await self._changed.wait()

    async def stored(self) -> None:
        """Waits until everything that was committed is answered."""
        if self._storing:
            await asyncio.wait(self._storing)

    def stop(self) -> None:
        """Writes nothing more; responses still go to the store."""
        self._over = True

    def begin(self, sequence: int, started: float) -> Answer:
        """The answer to a message, still empty."""
        return Answer(pb.DraftResponse(sequence=sequence), [], [], started)

    def refuse(self, answer: Answer, what: str, session: int, reason: str, later: bool = False) -> None:
        """Refuses a session to "open", "step" or "commit"; `later`: it may ask again."""
        answer.response.refusals.add(session=session, reason=reason, later=later)
        self._refusals.labels(what).inc()
        self.refused += 1

    async def finish(self, answer: Answer, wanted: bool) -> None:
        """Answers a message that is applied: at once, or once the store has what it commits.

        Where nothing is `wanted`, unknown or refused, there is no answer.
        """
        if answer.unknown:
            answer.response.unknown = np.array(answer.unknown, UINT64).tobytes()
        if answer.commits:
            task = asyncio.ensure_future(self._store(answer))
            self._storing.add(task)
            task.add_done_callback(self._delivered)
        elif wanted or answer.unknown or answer.response.refusals:
            await self._write(answer)

    async def _store(self, answer: Answer) -> None:
        """Answers once the store has the responses; says so where it could not take them."""
        commits = answer.commits
        sessions = [commit.session for commit in commits]
        size = sum(total_size(commit.batch.records) for commit in commits)
        self._owe(size)
        try:
            outcomes = await asyncio.gather(
                *(self._history.store(commit.batch, commit.life) for commit in commits), return_exceptions=True
            )
        finally:
            self._owe(-size)
        commits.clear()  # the store has them: an answer that waits to be read holds no response
        for session, outcome in zip(sessions, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                self.refuse(answer, "commit", session, str(outcome), later=True)
            elif outcome is not None:
                raise outcome
        size = answer.response.ByteSize()
        self._owe(size)
        try:
            await self._write(answer)
        finally:
            self._owe(-size)

    def _owe(self, size: int) -> None:
        self._owed_bytes += size
        if size < 0:
            self._changed.set()

    def _delivered(self, task: "asyncio.Task[None]") -> None:
        self._storing.discard(task)
        self._changed.set()
        if not task.cancelled() and task.exception() is not None:
            log.info("answer not delivered", peer=self._peer, reason=repr(task.exception()))
        self._paid()

    async def _write(self, answer: Answer) -> None:
        self._seconds.observe(time.perf_counter() - answer.started)  # before the client can ask for it
        async with self._writing:
            if not self._over:
                await self._context.write(answer.response)
