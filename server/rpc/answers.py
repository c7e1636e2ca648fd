"""The answers that one Draft stream owes its client, and the responses that it must store first.

The answer to a message that commits waits until the store has the response; later messages do not wait for it. The owed
answers are bounded: beyond the bound, the server stops reading the stream.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import structlog

from histospec.protocol.arrays import INT32, UINT64
from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.history.tenants import Reservation
from histospec.server.observability.metrics import Metrics
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.connections import peer_of
from histospec.server.stores.interface import ResponseBatch
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

# Limits of one stream: responses that wait for the store, and answers that the client has not read.
OWED_ANSWERS = 1024
OWED_BYTES = 64 << 20
SHORT_ANSWER = 64 << 10
"""Bytes of an answer that needs no memory of all callers: a stream has one at a time, and streams are bounded."""


class Commit(NamedTuple):
    """The response of a closed session, for the store."""

    session: int
    batch: ResponseBatch
    generation: int
    """Of its namespace, see History.commit."""
    reservation: Reservation
    """Of the bytes of the batch; `History.commit` settles it."""


class Answer(NamedTuple):
    """The answer to one message, while the server applies the message."""

    response: pb.DraftResponse
    unknown: list[int]
    """Sessions in the message that the stream does not have."""
    commits: list[Commit]
    continued: dict[int, int]
    """Sessions that were not opened because they continue an aborted response, and the length of its prompt."""
    started: float
    """When the message arrived, by `time.perf_counter`."""


class Answers:
    """The answers of one stream, which may overtake each other. Used only on the event loop.

    Args:
        context: of the call; written to until `stop`.
        history: stores commits.
        metrics: counts refusals and measures the time to each answer.
        answering: has the memory for long answers.
        paid: called when an answer that waited for the store is delivered or lost.

    """

    def __init__(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        history: History,
        metrics: Metrics,
        answering: Answering,
        paid: Callable[[], None],
    ) -> None:
        self._context = context
        self._history = history
        self._seconds = metrics.rpc_seconds.labels("Draft")
        self._refusals = metrics.refusals
        self._answering = answering
        self._paid = paid
        self._peer = context.peer()
        self._over = False  # then gRPC has freed the call behind the context: using it would crash the process
        self._writing = asyncio.Lock()
        self._storing: set[asyncio.Task[None]] = set()
        self._owed_bytes = 0  # of responses that wait for the store, and of unwritten answers
        self._changed = asyncio.Event()
        self.refused = 0
        """How many times a session was refused."""

    @property
    def storing(self) -> bool:
        """Whether responses wait for the store, or their answers for the client."""
        return bool(self._storing)

    async def room(self) -> None:
        """Waits until few enough answers are owed."""
        while len(self._storing) >= OWED_ANSWERS or self._owed_bytes > OWED_BYTES:
            self._changed.clear()
            await self._changed.wait()

    async def stored(self) -> None:
        """Waits until all commits are answered."""
        if self._storing:
            await asyncio.wait(self._storing)

    def stop(self) -> None:
        """Stops writing answers; responses still go to the store."""
        self._over = True

    def begin(self, sequence: int, started: float) -> Answer:
        """Returns a new, empty answer to a message."""
        return Answer(pb.DraftResponse(sequence=sequence), [], [], {}, started)

    def refuse(self, answer: Answer, what: str, session: int, reason: str, later: bool = False) -> None:
        """Records that a session was refused: its "open", "step" or "commit". `later`: it may ask again."""
        answer.response.refusals.add(session=session, reason=reason, later=later)
        self._refusals.labels(what).inc()
        self.refused += 1

    async def finish(self, answer: Answer, wanted: bool, measured: bool = True) -> None:
        """Answers an applied message: at once, or once the store has its commits.

        Sends no answer if none is `wanted` and no session is unknown, refused or continued. `measured`: whether the
        time to the answer counts.
        """
        if answer.continued:
            answer.response.continued = np.array(list(answer.continued), UINT64).tobytes()
            answer.response.prompts = np.array(list(answer.continued.values()), INT32).tobytes()
        if answer.unknown:
            answer.response.unknown = np.array(answer.unknown, UINT64).tobytes()
        if answer.commits:
            task = asyncio.ensure_future(self._store(answer))
            self._storing.add(task)
            task.add_done_callback(self._delivered)
        elif wanted or answer.unknown or answer.continued or answer.response.refusals:
            await self._write(answer, measured)

    async def _store(self, answer: Answer) -> None:
        """Answers once the store has the responses, or reports that it failed."""
        commits = answer.commits
        sessions = [commit.session for commit in commits]
        size = sum(commit.batch.waiting_size for commit in commits)
        self._owe(size)
        try:
            storing = (self._history.commit(one.batch, one.generation, one.reservation) for one in commits)
            outcomes = await asyncio.gather(*storing, return_exceptions=True)
        finally:
            self._owe(-size)
        commits.clear()  # stored: an answer that waits for the client need not hold the responses
        for session, outcome in zip(sessions, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                self.refuse(answer, "commit", session, str(outcome), later=True)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif not outcome.records:
                answer.response.too_old += 1
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

    async def _write(self, answer: Answer, measured: bool = True) -> None:
        if measured:
            self._seconds.observe(time.perf_counter() - answer.started)  # observe before the client can read the metric
        async with self._writing:
            encoded = answer.response.SerializeToString()  # once: its size would take as long
            if len(encoded) > SHORT_ANSWER:
                async with self._answering.unread(peer_of(self._peer), len(encoded), math.inf):
                    await self._send(encoded)
            else:
                await self._send(encoded)

    async def _send(self, encoded: bytes) -> None:
        if not self._over:
            await self._context.write(encoded)
