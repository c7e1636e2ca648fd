"""A stream that ends with many sessions does not cost another stream its few, while the server closes them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc.aio
import pytest

from histospec.native import Engine
from histospec.server.errors import Crowded, LimitExceeded
from histospec.server.observability.metrics import Metrics
from histospec.server.open_store import open_store
from histospec.server.rpc import service as rpc_service
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.connections import Connections
from histospec.server.rpc.service import DraftService
from histospec.server.security.access import Access
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb
from tests.support.histories import opened
from tests.support.waiting import until
from tests.support.wires import i32, u64

MEMORY = 1 << 24
SESSIONS = 400  # the server closes them in many slices
TOKENS = 10_000  # of each session after its step, so that all together exceed MEMORY


class Call:
    """A Draft call without a network, whose messages the test sends one by one."""

    def __init__(self, service: DraftService) -> None:
        self._requests: asyncio.Queue[object] = asyncio.Queue()
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.read = self._requests.get
        self.write = self._answers.put
        self.serving = asyncio.ensure_future(service.Draft(None, cast(Any, self)))

    def peer(self) -> str:
        return "a worker"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def open(self, sessions: range) -> None:
        opens = [pb.OpenSession(session=s, namespace="run", prompt=i32([7, s])) for s in sessions]
        self._requests.put_nowait(pb.DraftRequest(sequence=1, opens=opens))

    async def step(self, sessions: range, tokens: int) -> pb.DraftResponse:
        """Appends the first tokens of each session."""
        count = len(sessions)
        step = pb.Step(
            sessions=u64(sessions), positions=i32([0] * count), lengths=i32([tokens] * count),
            tokens=i32(range(tokens)) * count,
        )  # fmt: skip
        self._requests.put_nowait(pb.DraftRequest(sequence=2, step=step))
        return pb.DraftResponse.FromString(await self._answers.get())

    def end(self) -> None:
        self._requests.put_nowait(grpc.aio.EOF)  # type: ignore[attr-defined]


class Served(NamedTuple):
    engine: Engine
    service: DraftService


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    config = Config(data_dir=folder, memory=MEMORY, namespace_tokens=0)
    engine = Engine(config.memory, namespace_tokens=0)
    async with opened(open_store(config, "shard-0"), engine) as history:
        metrics = Metrics(engine, history.counts)
        answering = Answering(Connections(), metrics)
        yield Served(engine, DraftService(engine, history, metrics, config, Access(None), answering))


@pytest.mark.asyncio
async def test_a_stream_that_ends_costs_no_other_its_session(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, service):
        few, many = Call(service), Call(service)
        few.open(range(1))
        many.open(range(SESSIONS))
        await many.step(range(SESSIONS), TOKENS)
        assert engine.running_bytes() > MEMORY
        many.end()
        await many.serving
        assert engine.running_bytes() > MEMORY, "the sessions are closed already"
        answer = await few.step(range(1), 5)
        assert not answer.refusals
        few.end()
        await few.serving
        await until(lambda: engine.stats()["sessions"] == 0, "a session is left")


@pytest.mark.asyncio
@pytest.mark.parametrize(("error", "waits"), [(LimitExceeded, False), (Crowded, True)])
async def test_streams_of_a_caller_pause_after_a_refusal_for_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[LimitExceeded], waits: bool
) -> None:
    monkeypatch.setattr(rpc_service, "PAUSE_SECONDS", 1e6)
    async with served(tmp_path) as (_, service):
        refused = Call(service)
        await until(lambda: len(service.streams) == 1, "the stream does not begin")
        next(iter(service.streams)).refuse(error("refused"))
        with pytest.raises(error):
            await refused.serving
        after = Call(service)
        after.open(range(1))
        answered, _ = await asyncio.wait((asyncio.ensure_future(after.step(range(1), 5)),), timeout=1 if waits else 60)
        assert bool(answered) is not waits
        after.serving.cancel()
