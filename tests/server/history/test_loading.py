"""Background loading: the index has what the store has, each response once, whatever callers do meanwhile."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history import loading as background
from histospec.server.history import missing
from histospec.server.history.history import History
from histospec.server.history.indexing import Indexing
from histospec.server.rpc import wire
from histospec.server.rpc.open_sessions import OpenSessions
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite import reader as sqlite_reader
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.histories import opened
from tests.support.waiting import Latch

pytestmark = pytest.mark.asyncio

NAMESPACES = ("run", "other", "third")
PROBLEMS = 24
NAMED = 4  # problems with a name, with two prompts each


def prompt(number: int, which: int = 0) -> bytes:
    return np.array([number, which, 7], "<i4").tobytes()


def problem(namespace: str, number: int, which: int = 0) -> Problem:
    """Returns one of the problems of a namespace; a named one with either of its prompts."""
    if number < NAMED:
        return Problem(namespace, prompt(number, which), f"name-{number}")
    return Problem(namespace, prompt(number))


class Texts:
    """Returns unique responses."""

    def __init__(self) -> None:
        self._next = 1000

    def __call__(self) -> bytes:
        self._next += 1
        return np.array([self._next, 5, 6, self._next], "<i4").tobytes()


def fill(directory: Path, texts: Texts, responses: int = 8) -> None:
    """Fills a store as an earlier server would."""
    store = SQLiteStore(directory, 100)
    for namespace in NAMESPACES:
        for number in range(PROBLEMS):
            for epoch in range(responses):
                store.append(ResponseBatch(problem(namespace, number, epoch % 2), [Record(texts(), epoch)]))
    store.rewind("none", 0).result()
    store.close()


@asynccontextmanager
async def started(directory: Path, memory: int = 1 << 28) -> AsyncIterator[tuple[Engine, SQLiteStore, History]]:
    """A server that has just started, and loads what was stored before."""
    engine, store = Engine(memory, history_epochs=100, namespace_tokens=0), SQLiteStore(directory, 100)
    async with opened(store, engine) as history:
        yield engine, store, history


def indexed(engine: Engine, of: Problem) -> Counter[tuple[bytes, int]]:
    found = engine.history(of.namespace, np.frombuffer(of.prompt, "<i4"), problem=of.name or None)
    return Counter((tokens.tobytes(), epoch) for tokens, epoch in found)


def stored(store: SQLiteStore, of: Problem) -> Counter[tuple[bytes, int]]:
    return Counter((record.tokens, record.epoch) for record in store.history(of))


async def everything_is_found(engine: Engine, store: SQLiteStore, history: History) -> None:
    """The naive reference: the index has all stored responses of each requested problem once."""
    for namespace in NAMESPACES:
        for number in range(PROBLEMS):
            history.missing.want(problem(namespace, number))
    await history.missing.calm()
    await asyncio.to_thread(engine.wait_until_built)
    for namespace in NAMESPACES:
        for number in range(PROBLEMS):
            asked = problem(namespace, number)
            assert indexed(engine, asked) == stored(store, asked), asked


class Callers:
    """Sessions, ingests, drops and rewinds at random moments."""

    def __init__(self, engine: Engine, history: History, texts: Texts, seed: int) -> None:
        self._engine = engine
        self._history = history
        self._sessions = OpenSessions(engine, history)
        self._texts = texts
        self._random = random.Random(seed)
        self._numbers = iter(range(1, 1 << 30))

    async def run(self, operations: int) -> None:
        for _ in range(operations):
            await self._pause()
            what = self._random.choices([self._session, self._ingest, self._drop, self._rewind], [60, 30, 1, 3])
            await what[0](self._random.choice(NAMESPACES), self._random.randrange(PROBLEMS))

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.choice([0, 0, 0.001, 0.003]))

    async def _session(self, namespace: str, number: int) -> None:
        which, session = problem(namespace, number, self._random.randrange(2)), next(self._numbers)
        tokens = np.frombuffer(which.prompt, np.int32)
        await self._sessions.open(wire.Open(session, which, tokens, np.empty(0, np.int32), None, False, ""))
        await self._pause()
        text = np.frombuffer(self._texts(), np.int32)
        numbers = self._sessions.numbers([session])
        self._engine.step(numbers, text, np.array([0, len(text)]))
        await self._pause()
        epoch = self._history.epochs.newest(namespace) + self._random.randrange(2)
        commit = self._sessions.commit(wire.Close(session, True, epoch, None, b"", len(text), 0, b""), epoch)
        assert commit is not None
        await self._history.commit(commit.batch, commit.generation, commit.reservation)

    async def _ingest(self, namespace: str, number: int) -> None:
        epoch = self._history.epochs.newest(namespace)
        records = [Record(self._texts(), epoch) for _ in range(self._random.randrange(1, 4))]
        await self._history.add(ResponseBatch(problem(namespace, number, self._random.randrange(2)), records))

    async def _drop(self, namespace: str, _: int) -> None:
        await self._history.drop(namespace)

    async def _rewind(self, namespace: str, _: int) -> None:
        await self._history.rewind(namespace, max(0, self._history.epochs.newest(namespace) - 2))


@pytest.mark.parametrize("seed", range(6))
async def test_the_index_has_what_the_store_has_whatever_callers_do_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(sqlite_reader, "PROBLEMS_AT_ONCE", 2)
    monkeypatch.setattr(sqlite_reader, "ROWS", 3)
    monkeypatch.setattr(missing, "WAITING", 2 if seed % 2 else 4096)  # some reads are skipped
    monkeypatch.setattr(background, "threads", lambda: 3)
    restore = Indexing.restore

    def slowly(*arguments: Any) -> None:
        time.sleep(0.002)  # so that loading and callers overlap
        restore(*arguments)

    monkeypatch.setattr(Indexing, "restore", slowly)
    texts = Texts()
    fill(tmp_path, texts)
    async with started(tmp_path) as (engine, store, history):
        callers = [Callers(engine, history, texts, 100 * seed + n) for n in range(8)]
        await asyncio.gather(*(one.run(60) for one in callers))
        await history.loading.done.wait()
        monkeypatch.setattr(missing, "WAITING", 4096)
        await everything_is_found(engine, store, history)
        engine.check_integrity()


class Gate:
    """Delays background reads, but not reads on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, behind: int = 0) -> None:
        self._gate = Latch()
        self.waits = Latch()
        pages = SQLiteStore.wanted_first

        def slowly(store: SQLiteStore) -> Iterator[list[Problem]]:
            for number, page in enumerate(pages(store)):
                if number >= behind:
                    self.waits.set()
                    self._gate.wait()
                yield page

        monkeypatch.setattr(SQLiteStore, "wanted_first", slowly)

    def open(self) -> None:
        self._gate.set()


async def test_what_is_asked_for_is_read_though_loading_has_not_come_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, Texts())
    gate = Gate(monkeypatch)
    async with started(tmp_path) as (engine, store, history):
        assert history.loading.ready
        assert history.counts.loading
        asked = problem("run", 9)
        history.missing.want(asked)
        await history.missing.calm()
        assert indexed(engine, asked) == stored(store, asked)
        assert not history.loading.done.is_set()
        gate.open()
        await history.loading.done.wait()
        assert not history.counts.loading
        assert history.counts.loaded_responses == store.count()
        await everything_is_found(engine, store, history)
        assert history.counts.lookups == {"hit": 1}


@pytest.mark.parametrize("what", ["drop", "rewind"])
async def test_a_drop_or_rewind_does_not_wait_for_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fill(tmp_path, Texts())
    gate = Gate(monkeypatch)
    async with started(tmp_path) as (engine, store, history):
        if what == "drop":
            assert await history.drop("run") == PROBLEMS * 8
        else:
            assert await history.rewind("run", 3) == PROBLEMS * 4
        assert not history.loading.done.is_set()
        gate.open()
        await history.loading.done.wait()
        await everything_is_found(engine, store, history)
        assert sum(stored(store, problem("run", 9)).values()) == (0 if what == "drop" else 4)


def fill_large(directory: Path, problems: int) -> None:
    """Stores 4 responses of 2,000 tokens for each problem, about 80 KB in the index; writes the first problem last."""
    rng = np.random.default_rng(0)
    store = SQLiteStore(directory, 8)
    for number in reversed(range(problems)):
        texts = rng.integers(0, 50_000, (4, 2000)).astype("<i4")
        store.append(ResponseBatch(problem("run", number), [Record(text.tobytes(), 1) for text in texts]))
    store.rewind("none", 0).result()
    store.close()


async def test_loading_stops_before_it_drives_anything_out_and_the_rest_is_read_on_demand(tmp_path: Path) -> None:
    """
    1. A store of about three times the budget is loaded: the problems with the latest writes, up to 90 %.
    2. Nothing is evicted, and the server reports how much is left.
    3. A session on a problem that is left finds its history; the least recently written problems make room for it.
    """
    fill_large(tmp_path, 600)
    with capture_logs() as logs:
        async with started(tmp_path, 1 << 24) as (engine, store, history):
            await history.loading.done.wait()
            assert not engine.evicted()
            assert 0.8 < engine.memory_bytes() / (1 << 24) < 1.0
            known = [bool(indexed(engine, problem("run", number))) for number in range(600)]
            held = known.index(False)
            assert not any(known[held:])  # only the newest ones
            assert 50 < held < 300
            assert history.loading.progress.startswith(f"loaded {4 * held} of 2400 responses, as many as --memory")
            for number in range(599, 499, -1):
                asked = problem("run", number)
                session = engine.open("run", np.frombuffer(asked.prompt, "<i4"))
                history.missing.want(asked)
                await history.missing.calm()
                engine.close(session, commit=False)
            assert history.counts.lookups == {"hit": 100}
            assert indexed(engine, problem("run", 500)) == stored(store, problem("run", 500))
            assert engine.evicted()
            assert indexed(engine, problem("run", 0)) == stored(store, problem("run", 0))
            assert not indexed(engine, problem("run", held - 1))
    (said,) = [line for line in logs if line["event"].startswith("loaded")]
    assert said["event"] == "loaded as much as --memory holds; the rest is read when asked for"
    assert (said["responses"], said["of"]) == (4 * held, 2400)


async def test_a_server_that_ends_does_not_load_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_reader, "PROBLEMS_AT_ONCE", 1)
    fill(tmp_path, Texts())
    gate = Gate(monkeypatch, behind=5)
    async with started(tmp_path) as (engine, _, history):
        await asyncio.to_thread(gate.waits.wait)
        history.loading.give_up()
        gate.open()
        await history.close()
        assert 0 < history.counts.loaded_responses < 8 * 20
        assert engine.stats()["namespaces"]


async def test_a_store_that_fails_ends_the_loading_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Problems are read on demand; those that cannot be read at first, later."""
    fill(tmp_path, Texts())
    pages, broken = SQLiteStore.pages, [True]

    def failing(store: SQLiteStore, of: Problem) -> Iterator[list[Record]]:
        if broken:
            raise StoreError("store: the disk is gone")
        yield from pages(store, of)

    monkeypatch.setattr(SQLiteStore, "pages", failing)
    with capture_logs() as logs:
        async with started(tmp_path) as (engine, store, history):
            await history.loading.done.wait()
            history.missing.want(problem("run", 9))
            await history.missing.calm()
            assert history.loading.progress == "loading stopped; the rest is read when asked for"
            assert history.counts.lookups == {"failed": 1}
            broken.clear()
            await everything_is_found(engine, store, history)
    assert [line["event"] for line in logs if line["log_level"] == "error"] == [
        "loading stopped; problems are read when they are asked for"
    ]


async def test_progress_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(sqlite_reader, "PROBLEMS_AT_ONCE", 24)
    monkeypatch.setattr(background, "threads", lambda: 1)
    fill(tmp_path, Texts())
    with capture_logs() as logs:
        async with started(tmp_path) as (_, store, history):
            await history.loading.done.wait()
            assert history.loading.progress == "loaded"
            total = store.count()
    *lines, last = [line for line in logs if line["event"].startswith("load")]
    assert {line["event"] for line in lines} == {"loading"}
    assert (last["event"], last["responses"], last["tokens"]) == ("loaded", total, 4 * total)
    responses = [line["responses"] for line in lines]
    assert responses == sorted(responses)
    assert 0 < responses[0] < responses[-1] == total
    assert all((line["of"], line["epoch"]) == (total, 7) for line in lines)
