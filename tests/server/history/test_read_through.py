"""Problems that the index does not hold: read once, never twice, and only while they are wanted."""

import asyncio
from typing import cast

import pytest
import pytest_asyncio

from histospec.server.errors import StoreError
from histospec.server.history import read_through
from histospec.server.history.counts import Counts
from histospec.server.history.indexing import Indexing
from histospec.server.history.read_through import ReadThrough
from histospec.server.stores.interface import Problem, Record, ResponseBatch, Store

pytestmark = pytest.mark.asyncio

PROBLEM = Problem("run", b"1234")


class World:
    """A store and an index, as dictionaries."""

    def __init__(self) -> None:
        self.stored: dict[Problem, list[Record]] = {}
        self.indexed: list[ResponseBatch] = []
        self.reads = 0
        self.broken = False
        self.counts = Counts()
        self.through = ReadThrough(cast(Store, self), cast(Indexing, self), self.counts)

    def history(self, problem: Problem) -> list[Record]:
        self.reads += 1
        if self.broken:
            raise StoreError("the store is away")
        return self.stored.get(problem, [])

    def holds(self, problem: Problem) -> bool:
        return any(batch.problem == problem for batch in self.indexed)

    async def add(self, batches: list[ResponseBatch]) -> None:
        self.indexed.extend(batches)

    def lookups(self) -> dict[str, int]:
        return dict(self.counts.lookups)


@pytest_asyncio.fixture
async def world() -> World:
    return World()


async def test_a_problem_is_read_once_for_all_who_want_it(world: World) -> None:
    world.stored[PROBLEM] = [Record(b"aaaa", 0), Record(b"bbbb", 0), Record(b"cccc", 3)]
    for _ in range(16):
        world.through.want(PROBLEM)
    await world.through.settled(PROBLEM)
    world.through.want(PROBLEM)
    assert world.reads == 1
    assert [[r.tokens for r in batch.records] for batch in world.indexed] == [[b"aaaa", b"bbbb"], [b"cccc"]]
    assert world.lookups() == {"hit": 1}
    await world.through.close()


async def test_what_is_absent_is_not_asked_for_again_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.through.want(PROBLEM)
    while world.through._reading:
        await asyncio.sleep(0)
    world.through.want(PROBLEM)
    assert world.reads == 1
    await world.through.settled(PROBLEM)  # something of it is about to be stored
    world.through.want(PROBLEM)
    await world.through.forget()
    assert world.reads == 2
    monkeypatch.setattr(read_through, "ABSENT_SECONDS", 0.0)
    world.through.want(PROBLEM)
    await world.through.forget()
    assert world.lookups() == {"miss": 3}
    await world.through.close()


async def test_what_is_being_added_is_not_read_back(world: World) -> None:
    with world.through.paused(PROBLEM), world.through.paused(PROBLEM):
        world.through.want(PROBLEM)
    assert not world.through._reading
    assert not world.through._paused
    world.through.want(PROBLEM)
    assert world.through._reading
    await world.through.close()


async def test_a_store_that_is_away_is_asked_again_later(world: World) -> None:
    world.broken = True
    world.through.want(PROBLEM)
    await world.through.settled(PROBLEM)
    world.broken = False
    world.stored[PROBLEM] = [Record(b"aaaa", 0)]
    world.through.want(PROBLEM)
    await world.through.settled(PROBLEM)
    assert len(world.indexed) == 1
    assert world.lookups() == {"failed": 1, "hit": 1}
    await world.through.close()


async def test_what_waits_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_through, "WAITING", 5)
    for number in range(9):
        world.through.want(Problem("run", bytes([number] * 4)))
    await world.through.close()
    assert world.reads == 5
    assert world.lookups() == {"skipped": 4, "miss": 5}
