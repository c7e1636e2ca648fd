"""An index with everything of its store does not ask the store; once something is missing, it asks again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import pytest_asyncio

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.history.indexing import Indexing
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import put
from tests.support.histories import opened

pytestmark = pytest.mark.asyncio

KNOWN, NEW = Problem("run", b"aaaa"), Problem("run", b"bbbb")
BUDGET = 8 << 20


class NotingStore(SQLiteStore):
    """Notes which problems are read, and fails to drop while `broken`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 8)
        self.reads: list[Problem] = []
        self.broken = False

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        self.reads.append(problem)
        return super().pages(problem)

    def drop(self, namespace: str) -> "Future[int]":
        if not self.broken:
            return super().drop(namespace)
        failed: Future[int] = Future()
        failed.set_exception(StoreError("disk gone"))
        return failed


@pytest.fixture
def engine() -> Engine:
    return Engine(BUDGET, namespace_tokens=0)


@pytest.fixture
def store(tmp_path: Path) -> NotingStore:
    return NotingStore(tmp_path)


@pytest_asyncio.fixture
async def history(engine: Engine, store: NotingStore) -> AsyncIterator[History]:
    """Returns a history that has loaded its store, which has one response of KNOWN."""
    put(store, b"aaaa", 5)
    async with opened(store, engine) as history:
        await history.loading.done.wait()
        store.reads.clear()
        yield history


def batch(problem: Problem, tokens: int = 4) -> ResponseBatch:
    return ResponseBatch(problem, [Record(bytes(4 * tokens), 6)])


async def test_new_problems_are_not_looked_for(history: History, store: NotingStore) -> None:
    for problem in (KNOWN, NEW):
        history.missing.want(problem)
        await history.add(batch(problem))
    assert store.reads == []


async def test_after_a_rewind_the_rest_is_read(history: History, store: NotingStore) -> None:
    await history.add(batch(KNOWN))
    await history.rewind("run", 5)
    await history.add(batch(KNOWN))
    assert store.reads == [KNOWN]


async def test_after_a_drop_nothing_is_looked_for(history: History, store: NotingStore) -> None:
    await history.drop("run")
    await history.add(batch(KNOWN))
    assert store.reads == []


async def test_what_was_ingested_during_a_drop_is_read(history: History, store: NotingStore) -> None:
    await asyncio.gather(history.drop("run"), history.add(batch(NEW)))
    await history.add(batch(KNOWN))
    assert store.reads == [KNOWN]


async def test_what_a_session_from_before_a_drop_leaves_is_read(history: History, store: NotingStore) -> None:
    generation = history.missing.want(NEW)
    await history.drop("run")
    await history.commit(batch(NEW), generation, history.tenants.reserve("", 0))
    await history.add(batch(KNOWN))
    assert store.reads == [KNOWN]


async def test_a_drop_that_failed_forgets_nothing_that_is_missing(history: History, store: NotingStore) -> None:
    await history.rewind("run", 5)
    store.broken = True
    with pytest.raises(StoreError):
        await history.drop("run")
    await history.add(batch(KNOWN))
    assert store.reads == [KNOWN]


async def test_what_is_lacking_in_one_namespace_is_looked_for_in_no_other(history: History, store: NotingStore) -> None:
    await history.rewind("other", 5)
    await history.add(batch(NEW))
    assert store.reads == []


async def test_after_an_eviction_what_is_gone_is_read(engine: Engine, history: History, store: NotingStore) -> None:
    number = 0
    while not engine.evicted():
        number += 1
        await history.add(batch(Problem("run", number.to_bytes(4, "little")), 10_000))
    assert store.reads == []
    await history.add(batch(KNOWN))
    assert store.reads == [KNOWN]


async def test_what_is_stored_but_could_not_be_indexed_is_read(
    history: History, store: NotingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(Indexing, "build", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            await history.add(batch(NEW))
    await history.add(batch(NEW))
    assert store.reads == [NEW]
