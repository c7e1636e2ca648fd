"""An index with everything of its store does not ask the store; once something is missing, it asks again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import put

pytestmark = pytest.mark.asyncio

KNOWN, NEW = Problem("run", b"aaaa"), Problem("run", b"bbbb")
BUDGET = 8 << 20


class Noting(History):
    """A history with its engine and the problems that it requested from its store."""

    def __init__(self, engine: Engine, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        self.engine = engine
        self.reads: list[Problem] = []


@pytest_asyncio.fixture
async def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Noting]:
    """Returns a history that has loaded a store with one response of KNOWN; `reads` records its requests."""
    store = SQLiteStore(tmp_path, 8)
    put(store, b"aaaa", 5)
    history = Noting(Engine(BUDGET, namespace_tokens=0), store, 4096)
    await history.load()
    await history.loading.done.wait()
    read = store.pages

    def noting(problem: Problem) -> Iterator[list[Record]]:
        history.reads.append(problem)
        return read(problem)

    monkeypatch.setattr(store, "pages", noting)
    yield history
    await history.close()


def failed(_: str) -> "Future[int]":
    answer: Future[int] = Future()
    answer.set_exception(StoreError("disk gone"))
    return answer


def batch(problem: Problem, tokens: int = 4) -> ResponseBatch:
    return ResponseBatch(problem, [Record(bytes(4 * tokens), 6)])


async def test_new_problems_are_not_looked_for(history: Noting) -> None:
    for problem in (KNOWN, NEW):
        history.missing.want(problem)
        await history.add(batch(problem))
    assert history.reads == []


async def test_after_a_rewind_the_rest_is_read(history: Noting) -> None:
    await history.add(batch(KNOWN))
    await history.rewind("run", 5)
    await history.add(batch(KNOWN))
    assert history.reads == [KNOWN]


async def test_after_a_drop_nothing_is_looked_for(history: Noting) -> None:
    await history.drop("run")
    await history.add(batch(KNOWN))
    assert history.reads == []


async def test_what_was_ingested_during_a_drop_is_read(history: Noting) -> None:
    await asyncio.gather(history.drop("run"), history.add(batch(NEW)))
    await history.add(batch(KNOWN))
    assert history.reads == [KNOWN]


async def test_what_a_session_from_before_a_drop_leaves_is_read(history: Noting) -> None:
    generation = history.missing.want(NEW)
    await history.drop("run")
    await history.commit(batch(NEW), generation)
    await history.add(batch(KNOWN))
    assert history.reads == [KNOWN]


async def test_a_drop_that_failed_forgets_no_gap(history: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    await history.rewind("run", 5)
    with monkeypatch.context() as broken:
        broken.setattr(history._store, "drop", failed)
        with pytest.raises(StoreError):
            await history.drop("run")
    await history.add(batch(KNOWN))
    assert history.reads == [KNOWN]


async def test_what_is_lacking_in_one_namespace_is_looked_for_in_no_other(history: Noting) -> None:
    await history.rewind("other", 5)
    await history.add(batch(NEW))
    assert history.reads == []


async def test_after_an_eviction_what_is_gone_is_read(history: Noting) -> None:
    number = 0
    while not history.engine.evicted():
        number += 1
        await history.add(batch(Problem("run", number.to_bytes(4, "little")), 10_000))
    assert history.reads == []
    await history.add(batch(KNOWN))
    assert history.reads == [KNOWN]


async def test_what_is_stored_but_could_not_be_indexed_is_read(
    history: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(history._indexing, "build", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            await history.add(batch(NEW))
    await history.add(batch(NEW))
    assert history.reads == [NEW]
