"""Problems missing in the index: read once, never twice, and only on demand."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import pytest_asyncio

from histospec.server.errors import StoreError
from histospec.server.history import missing
from histospec.server.history.counts import Counts
from histospec.server.history.indexing import Held, Indexing
from histospec.server.history.missing import Missing, Reading
from histospec.server.stores.interface import Problem, Record, Store
from tests.support.waiting import Latch

pytestmark = pytest.mark.asyncio

PROBLEM = Problem("run", b"1234")


class World:
    """A store and an index as dictionaries; each page of the store has two responses."""

    def __init__(self) -> None:
        self.stored: dict[Problem, list[Record]] = {}
        self.indexed: dict[Problem, list[Record]] = {}
        self.reads = 0
        self.broken = False
        self.counts = Counts()
        self.missing = Missing(cast(Store, self), cast(Indexing, self), self.counts)
        self.missing.open()

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        self.reads += 1
        if self.broken:
            raise StoreError("the store is away")
        records = list(self.stored.get(problem, []))
        while records:
            yield records[-2:]
            del records[-2:]

    def holds(self, problem: Problem) -> bool:
        return problem.identity in self.indexed

    def held(self, problem: Problem) -> Held:
        return Counter((record.tokens, record.epoch) for record in self.indexed.get(problem.identity, []))

    def restore(self, problem: Problem, records: list[Record], ahead: bool = False) -> None:
        self.indexed[problem.identity] = records + self.indexed.get(problem.identity, [])

    def evicted(self) -> bool:
        return False

    def lookups(self) -> dict[str, int]:
        return dict(self.counts.lookups)


@pytest_asyncio.fixture
async def world() -> World:
    return World()


async def store(world: World) -> None:
    """What a commit does around its write."""
    async with world.missing.storing(PROBLEM, world.missing.want(PROBLEM, known=True)):
        pass


async def test_a_problem_is_read_once_for_all_who_want_it(world: World) -> None:
    world.stored[PROBLEM] = [Record(b"aaaa", 0), Record(b"bbbb", 0), Record(b"cccc", 3)]
    for _ in range(16):
        world.missing.want(PROBLEM)
    await world.missing.calm()
    world.missing.want(PROBLEM)
    assert world.reads == 1
    assert world.indexed == world.stored
    assert world.lookups() == {"hit": 1}
    await world.missing.close()


async def test_what_is_absent_is_not_asked_for_again_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.missing.want(PROBLEM)
    await world.missing.calm()
    world.missing.want(PROBLEM)
    assert world.reads == 1
    await store(world)
    world.missing.want(PROBLEM)
    await world.missing.calm()
    assert world.reads == 2
    monkeypatch.setattr(missing, "ABSENT_SECONDS", 0.0)
    world.missing.want(PROBLEM)
    await world.missing.calm()
    assert world.lookups() == {"miss": 3}
    await world.missing.close()


async def test_what_is_being_added_is_not_read_back(world: World) -> None:
    generation = world.missing.want(PROBLEM, known=True)
    async with world.missing.storing(PROBLEM, generation):
        async with world.missing.storing(PROBLEM, generation):
            world.missing.want(PROBLEM)
        world.missing.want(PROBLEM)
    assert world.reads == 0
    world.missing.want(PROBLEM)
    await world.missing.calm()
    assert world.reads == 1
    await world.missing.close()


async def test_what_waits_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "WAITING", 5)
    for number in range(9):
        world.missing.want(Problem("run", bytes([number] * 4)))
    await world.missing.close()
    assert world.reads == 5
    assert world.lookups() == {"skipped": 4, "miss": 5}


async def test_the_prompts_of_what_waits_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "WAITING_BYTES", 22)
    world.missing = Missing(cast(Store, world), cast(Indexing, world), world.counts)
    some = [Problem("run", bytes([number] * 4)) for number in range(9)]
    for problem in (*some, *some):
        world.missing.want(problem)
    world.missing.open()
    await world.missing.calm()
    assert world.reads == 5
    for problem in (*some, *some):
        world.missing.want(problem)
    await world.missing.close()
    assert world.reads == 9
    assert world.lookups()["miss"] == 9


async def test_the_prompts_of_absent_problems_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tracemalloc.start()
    for number in range(30):
        world.missing.want(Problem("run", bytes([number]) * 2**20))
        await world.missing.calm()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert world.lookups() == {"miss": 30}
    assert held < 3 * 2**20
    monkeypatch.setattr(missing, "ABSENT_SECONDS", 0.0)
    world.missing.want(PROBLEM)
    await world.missing.close()
    assert len(world.missing._absent) == 1, "expired look-ups are kept"


async def test_a_named_problem_is_read_once_whatever_its_prompts(world: World) -> None:
    named = [Problem("run", prompt, "name") for prompt in (b"1234", b"5678")]
    world.stored = {problem: [Record(b"aaaa", 0)] for problem in named}
    for problem in named:
        world.missing.want(problem)
    await world.missing.calm()
    assert world.reads == 1
    assert world.indexed == {named[0].identity: [Record(b"aaaa", 0)]}
    await world.missing.close()


def result(reading: Reading) -> tuple[int, int, int, bool]:
    return reading.responses, reading.tokens, reading.epoch, reading.whole


@pytest.mark.parametrize("why", ["failed", "skipped"])
async def test_what_could_not_be_read_is_filled_in_behind_newer_responses(
    world: World, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index knows the problem by then, and nothing is indexed twice."""
    world.stored[PROBLEM] = [Record(bytes([i % 3] * 4), i // 2) for i in range(9)]
    world.broken = why == "failed"
    monkeypatch.setattr(missing, "WAITING", 0 if why == "skipped" else 9)
    world.missing.want(PROBLEM)
    await world.missing.calm()
    committed = [Record(b"\2\2\2\2", 4), Record(b"new.", 5)]
    world.stored[PROBLEM] += committed
    world.indexed[PROBLEM] = list(committed)
    world.broken = False
    monkeypatch.undo()
    world.missing.want(PROBLEM)
    await world.missing.calm()
    assert world.indexed == world.stored
    world.missing.want(PROBLEM)
    await world.missing.calm()
    assert world.lookups() == {why: 1, "hit": 1}
    await world.missing.close()


async def test_problems_are_loaded_unless_the_index_has_them_or_they_are_being_read(world: World) -> None:
    some = [Problem("run", bytes([i] * 4)) for i in range(4)]
    world.stored = {problem: [Record(b"aaaa", 3), Record(b"bbbb", 3), Record(b"cccc", 7)] for problem in some}
    world.restore(some[0], world.stored[some[0]])
    generation = world.missing.want(some[1])
    with ThreadPoolExecutor(1) as threads:
        async with world.missing.storing(some[2], generation):
            assert result(await world.missing.load(some, threads, lambda: True)) == (3, 3, 3, True)
    await world.missing.calm()
    del world.stored[some[2]]
    assert world.indexed == world.stored
    assert world.reads == 2
    assert world.counts.loaded_responses == 6
    await world.missing.close()


async def test_loading_that_is_given_up_says_that_something_is_left(world: World) -> None:
    some = [Problem("run", bytes([i] * 4)) for i in range(4)]
    world.stored = {problem: [Record(b"aaaa", 3)] for problem in some}
    with ThreadPoolExecutor(1) as threads:
        loaded = await world.missing.load(some, threads, lambda: len(world.indexed) < 2)
    assert result(loaded) == (2, 2, 3, False)
    await world.missing.close()


async def test_new_responses_wait_while_their_problem_is_loaded_and_a_drop_until_nothing_is(world: World) -> None:
    reading, gate = Latch(), Latch()
    pages = world.pages

    def slowly(problem: Problem) -> Iterator[list[Record]]:
        reading.set()
        gate.wait()
        yield from pages(problem)

    world.pages = slowly  # type: ignore[method-assign]
    world.stored[PROBLEM] = [Record(b"aaaa", 0)]
    order: list[str] = []

    async def append() -> None:
        await store(world)
        order.append("appended")

    async def drop() -> None:
        async with world.missing.still():
            order.append("dropped")
            world.missing.want(Problem("run", b"anew"))
            await asyncio.sleep(0.05)
            order.append("read" if world.reads > 1 else "nothing is read meanwhile")

    with ThreadPoolExecutor(1) as threads:
        loading = asyncio.ensure_future(world.missing.load([PROBLEM], threads, lambda: True))
        await asyncio.to_thread(reading.wait)
        others = [asyncio.ensure_future(append()), asyncio.ensure_future(drop())]
        await asyncio.sleep(0.05)
        assert order == []
        gate.set()
        await asyncio.gather(loading, *others)
    assert sorted(order) == ["appended", "dropped", "nothing is read meanwhile"]
    await world.missing.calm()
    assert world.reads == 2
    await world.missing.close()
