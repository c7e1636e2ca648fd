"""A stream that commits faster than the index accepts waits, and memory stays within a tenth of the budget."""

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from histospec.native import Engine
from histospec.server.errors import StoreFull
from histospec.server.history import history
from histospec.server.stores.interface import ResponseBatch
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.v1 import draft_pb2 as pb
from tests.support import batches
from tests.support.histories import opened
from tests.support.servers import Starter
from tests.support.waiting import Latch, until
from tests.support.wires import Connector, Wire

BUDGET = 32 << 20
STRANGE = 50  # a session that was never opened
TEXT = np.random.default_rng(0).integers(0, 50_000, 20_000).astype("<i4").tobytes()


def commit(wire: Wire, number: int, problem: int, epoch: int) -> pb.DraftRequest:
    """Returns a message that opens a session, writes 20,000 tokens and commits them."""
    return pb.DraftRequest(
        sequence=number,
        opens=[wire.open(number, [problem])],
        step=pb.Step(
            sessions=np.array([number], "<u8").tobytes(),
            positions=np.zeros(1, "<i4").tobytes(),
            lengths=np.array([20_000], "<i4").tobytes(),
            tokens=TEXT,
        ),
        closes=[pb.CloseSession(session=number, commit=True, generated=20_000, epoch=epoch)],
    )


@pytest.mark.parametrize("problems", [1, 1000], ids=["one-problem", "many-problems"])
def test_memory_holds_under_a_flood_of_commits(start_server: Starter, connect: Connector, problems: int) -> None:
    server = start_server("--memory", str(BUDGET), "--history-epochs", "2")
    wire = connect(server.endpoint)
    largest = 0.0
    over = Latch()

    def watch() -> None:
        nonlocal largest
        while not over.wait(0.02):
            largest = max(largest, server.metrics()["histospec_index_bytes"])

    watching = threading.Thread(target=watch)
    watching.start()
    messages = 400
    call = wire.stub.Draft(commit(wire, n, n % problems, n // 50) for n in range(1, messages + 1))
    answers = list(call)
    over.set()
    watching.join()
    assert sorted(a.sequence for a in answers) == list(range(1, messages + 1))
    refused = [r for a in answers for r in a.refusals]
    assert all(r.later for r in refused), "what could not be taken may come again"
    assert largest <= 1.1 * BUDGET
    assert server.metrics()["histospec_ingested_responses_total"] == messages - len(refused)


def test_sessions_alone_do_not_outgrow_the_budget(start_server: Starter, connect: Connector) -> None:
    server = start_server("--memory", "16MiB")
    wire = connect(server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(n, [n]) for n in range(8)], step=wire.step(list(range(8)), [[1]] * 8))
    refused: dict[int, str] = {}
    rng = np.random.default_rng(1)
    for at in range(1, 400_000, 40_000):
        alive = [n for n in range(8) if n not in refused]
        texts = [rng.integers(0, 50_000, 40_000).tolist() for _ in alive]
        step = wire.step([*alive, STRANGE], [*texts, [1]], [at] * len(alive) + [0], max_tokens=0)
        answer = stream.ask(step=step)
        refused |= {r.session: r.reason for r in answer.refusals}
        assert np.frombuffer(answer.unknown, "<u8").tolist() == [STRANGE]  # unknown, not refused: it may reopen
    assert refused
    assert all("--memory" in reason for reason in refused.values())
    assert server.metrics()["histospec_index_bytes"] <= 1.1 * (16 << 20) + 8 * 40_000 * 64
    assert wire.drafts(stream.ask(opens=[wire.open(99)], step=wire.step([99], [[1, 2, 3]])))


class SlowEngine:
    """An engine whose index accepts nothing until released."""

    def __init__(self) -> None:
        self.engine = Engine(1 << 24)
        self.may = Latch()

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def ingest(self, *args: Any, **options: Any) -> None:
        self.may.wait()
        self.engine.ingest(*args, **options)


def batch(tokens: int, prompt: bytes) -> ResponseBatch:
    return batches.batch(bytes(4 * tokens), prompt=prompt)


class BlockedStore(SQLiteStore):
    """A store whose queue of 1 MiB is not written until `gate` is set.

    overtaking: a commit that reaches the queue before the first batch.
    """

    def __init__(self, folder: Path, overtaking: ResponseBatch | None = None) -> None:
        super().__init__(folder, 8, max_backlog=1 << 20)
        self.gate = Latch()
        self.submit(lambda connection: self.gate.wait())
        self._overtaking = overtaking

    def append(self, batch: ResponseBatch) -> "Future[int]":
        overtaking, self._overtaking = self._overtaking, None
        if overtaking is not None:
            super().append(overtaking)
        return super().append(batch)


@pytest.mark.asyncio
async def test_ingests_wait_while_commits_fill_the_queue_of_the_store(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path)
    async with opened(store) as mine:
        one = batch(250_000, b"one.")
        commit = asyncio.create_task(mine.commit(one, mine.missing.want(one.problem), mine.tenants.reserve("", 0)))
        try:
            await until(lambda: store.waiting_bytes > 0)
            with pytest.raises(StoreFull, match="faster than the store and the index can take them; try later"):
                await mine.add(batch(25_000, b"two."), patience=0.0)
            adding = [asyncio.create_task(mine.add(batch(tokens, b"two."), patience=60.0)) for tokens in (25_000, 1)]
            larger = asyncio.create_task(mine.add(batch(500_000, b"two."), patience=60.0))  # than the whole queue
            await asyncio.wait([*adding, larger], timeout=10 * history.CHECK_SECONDS)
            assert [task.done() for task in (*adding, larger)] == [False] * 3
        finally:
            store.gate.set()
        await asyncio.gather(commit, *adding, larger)
        assert store.count() == 4


@pytest.mark.asyncio
async def test_an_ingest_waits_again_if_commits_take_its_room(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path, overtaking=batch(250_000, b"one."))
    async with opened(store) as mine:
        adding = asyncio.create_task(mine.add(batch(25_000, b"two."), patience=60.0))
        try:
            await until(lambda: mine.counts.store_errors == 1)
            assert not adding.done()
        finally:
            store.gate.set()
        await adding
        assert store.count() == 2


@pytest.mark.asyncio
async def test_ingests_wait_for_the_index_before_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, callers that ingest faster than segments are built would fill the memory with stored responses."""
    monkeypatch.setattr(history, "MAX_UNINDEXED", 3000)
    engine, store = SlowEngine(), SQLiteStore(tmp_path, 8)
    async with opened(store, cast(Engine, engine)) as mine:
        adding = [asyncio.create_task(mine.add(batch(400, bytes([n, 0, 0, 0])))) for n in range(6)]
        try:
            await until(lambda: store.count() >= 2)
            await asyncio.sleep(10 * history.CHECK_SECONDS)  # enough time for the others to check
            stored = store.count()
        finally:
            engine.may.set()
        assert stored == 2
        await asyncio.gather(*adding)
        assert store.count() == 6
