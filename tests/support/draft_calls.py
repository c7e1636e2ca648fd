"""A draft service in this process, and calls to it without a network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc.aio

from histospec.native import Engine
from histospec.server.observability.metrics import Metrics
from histospec.server.open_store import open_store
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.connections import Connections
from histospec.server.rpc.service import DraftService
from histospec.server.security.access import Access
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb
from tests.support.histories import opened
from tests.support.wires import i32, u64

MEMORY = 1 << 24


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

    def send(self, request: pb.DraftRequest) -> None:
        self._requests.put_nowait(request)

    async def answer(self) -> pb.DraftResponse:
        return pb.DraftResponse.FromString(await self._answers.get())

    def open(self, sessions: range) -> None:
        opens = [pb.OpenSession(session=s, namespace="run", prompt=i32([7, s])) for s in sessions]
        self.send(pb.DraftRequest(sequence=1, opens=opens))

    async def step(self, sessions: range, tokens: int) -> pb.DraftResponse:
        """Appends the first tokens of each session."""
        count = len(sessions)
        step = pb.Step(
            sessions=u64(sessions), positions=i32([0] * count), lengths=i32([tokens] * count),
            tokens=i32(range(tokens)) * count,
        )  # fmt: skip
        self.send(pb.DraftRequest(sequence=2, step=step))
        return await self.answer()

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
