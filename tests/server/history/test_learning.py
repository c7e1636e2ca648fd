"""Estimators across restarts: nothing saved is lost, and a bad state does no harm."""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.v1 import draft_pb2 as pb
from tests.support.histories import opened
from tests.support.servers import Server, Starter, run_first
from tests.support.waiting import Latch, eventually
from tests.support.wires import Connector, Wire

PROMPT = [1, 2, 3]
RESPONSE = list(range(10, 60))
OTHER = [*range(10, 30), *range(200, 230)]  # diverges from RESPONSE in the middle


@contextlib.contextmanager
def database(server: Server) -> Iterator[sqlite3.Connection]:
    """The file of a server, as another program sees it."""
    with contextlib.closing(sqlite3.connect(server.data_dir / FILE_NAME, timeout=10)) as connection, connection:
        yield connection


def saved(server: Server) -> dict[str, bytes]:
    with database(server) as connection:
        return dict(connection.execute("SELECT namespace, state FROM estimators"))


def learn(wire: Wire) -> None:
    """Sessions follow their drafts up to the middle of the response, and then diverge."""
    stream = wire.stream()
    for session in range(3):
        stream.send(opens=[wire.open(session)])
        for at in range(0, len(OTHER), 5):
            stream.ask(step=wire.step([session], [OTHER[at : at + 5]], [at]))
        stream.send(closes=[pb.CloseSession(session=session)])
    stream.ask(step=wire.step([], []))
    stream.end()


def probs(wire: Wire) -> list[float]:
    """Returns the probabilities of a draft that teaches nothing: the session starts with its whole context."""
    stream = wire.stream()
    opening = wire.open(99, generated=wire.i32(RESPONSE[:5]))
    answer = stream.ask(opens=[opening], step=wire.step([99], [[]], [5], verify_cost=0.0))
    stream.end()
    assert wire.drafts(answer) == [RESPONSE[5:21]]
    found: list[float] = np.frombuffer(answer.probs, "<f4").tolist()
    return found


def restarted(server: Server, connect: Connector) -> Wire:
    server.terminate()
    assert server.wait() == 0
    server.start()
    return connect(server.endpoint)


def warnings(server: Server) -> list[str]:
    return [str(entry["event"]) for entry in server.log if entry["level"] not in ("info", "debug")]


def test_a_restart_changes_no_probability(server: Server, wire: Wire, connect: Connector) -> None:
    wire.ingest(PROMPT, [RESPONSE])
    at_first = probs(wire)
    learn(wire)
    learned = probs(wire)
    assert learned != at_first
    wire = restarted(server, connect)
    assert probs(wire) == learned
    [state] = saved(server).values()
    # In process, the engine gives the same from the same state and history.
    engine = Engine(1 << 26)
    engine.restore_estimator("run", state)
    assert engine.estimator_state("run") == state
    engine.ingest("run", PROMPT, [np.array(RESPONSE, np.int32)])
    session = engine.open("run", PROMPT, generated=RESPONSE[:5])
    drafted = engine.step(np.array([session]), np.array([], np.int32), np.array([0, 0]), verify_cost=0.0)
    assert drafted[2].tolist() == learned
    # A second restart, without learning in between, finds it again.
    wire = restarted(server, connect)
    assert probs(wire) == learned
    assert list(saved(server).values()) == [state]
    assert warnings(server) == []


def test_a_server_that_is_killed_keeps_what_was_saved_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: Starter, connect: Connector
) -> None:
    """
    1. A server that saves every 50 ms learns; wait until the file has its estimator. Kill it.
    2. Afterwards, its drafts have the same probabilities, and every response is there.
    """
    run_first("from histospec.server.history import learning\nlearning.SAVE_SECONDS = 0.05", tmp_path, monkeypatch)
    server = start_server()
    wire = connect(server.endpoint)
    wire.ingest(PROMPT, [RESPONSE])
    learn(wire)
    learned = probs(wire)
    engine = Engine(1 << 26)
    engine.ingest("run", PROMPT, [np.array(RESPONSE, np.int32)])

    def says(state: bytes | None) -> list[float]:
        if state is None:
            return []
        engine.restore_estimator("run", state)
        session = engine.open("run", PROMPT, generated=RESPONSE[:5])
        drafted = engine.step(np.array([session]), np.array([], np.int32), np.array([0, 0]), verify_cost=0.0)
        engine.close(session, commit=False)
        found: list[float] = drafted[2].tolist()
        return found

    eventually(lambda: says(saved(server).get("run")) == learned, "what was learned is not saved")
    server.kill()
    server.start()
    wire = connect(server.endpoint)
    assert probs(wire) == learned
    assert wire.history(PROMPT) == [RESPONSE]


def test_a_server_that_is_killed_before_it_saved_forgets_only_what_it_learned(
    server: Server, wire: Wire, connect: Connector
) -> None:
    wire.ingest(PROMPT, [RESPONSE])
    at_first = probs(wire)
    learn(wire)
    server.kill()
    assert saved(server) == {}
    server.start()
    wire = connect(server.endpoint)
    assert probs(wire) == at_first
    assert wire.history(PROMPT) == [RESPONSE]
    assert warnings(server) == []


@pytest.mark.parametrize("change", [lambda s: b"", lambda s: s[:1000], lambda s: os.urandom(len(s)), lambda s: 7])
def test_a_state_that_cannot_be_used_is_left_aside(
    change: Callable[[bytes], object], server: Server, wire: Wire, connect: Connector
) -> None:
    wire.ingest(PROMPT, [RESPONSE])
    at_first = probs(wire)
    learn(wire)
    learned = probs(wire)
    server.terminate()
    assert server.wait() == 0
    with database(server) as connection:
        connection.execute("UPDATE estimators SET state = ?", (change(saved(server)["run"]),))
    server.start()
    wire = connect(server.endpoint)
    assert warnings(server) == ["saved estimators cannot be used; drafting starts from the defaults"]
    assert probs(wire) == at_first
    assert wire.history(PROMPT) == [RESPONSE]
    learn(wire)  # learns the same again, and that is saved instead
    wire = restarted(server, connect)
    assert probs(wire) == learned
    assert len(warnings(server)) == 1


def test_what_was_learned_in_a_dropped_namespace_does_not_come_back(
    server: Server, wire: Wire, connect: Connector
) -> None:
    wire.ingest(PROMPT, [RESPONSE])
    at_first = probs(wire)
    learn(wire)
    wire.ingest(PROMPT, [RESPONSE], namespace="other")
    wire = restarted(server, connect)
    assert set(saved(server)) == {"run"}
    wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="run"))
    assert saved(server) == {}
    wire = restarted(server, connect)
    assert saved(server) == {}
    wire.ingest(PROMPT, [RESPONSE])
    assert probs(wire) == at_first


# In process, where a test controls the timing


def teach(engine: Engine, namespace: str) -> None:
    engine.ingest(namespace, PROMPT, [np.array(RESPONSE, np.int32)])
    session = engine.open(namespace, PROMPT)
    for at in range(0, 20, 5):
        engine.step(np.array([session]), np.array(RESPONSE[at : at + 5], np.int32), np.array([0, 5]))
    engine.close(session, commit=False)


@contextlib.asynccontextmanager
async def learned(directory: Path) -> AsyncIterator[tuple[Engine, SQLiteStore, History]]:
    """An engine that has learned in the namespaces a and b, a store, and the history between them."""
    engine, store = Engine(1 << 26), SQLiteStore(directory, 8)
    async with opened(store, engine) as history:
        await history.loading.done.wait()
        for namespace in "ab":
            teach(engine, namespace)
        yield engine, store, history


def failing(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TEMP TRIGGER fail BEFORE INSERT ON estimators BEGIN SELECT RAISE(FAIL, 'full'); END")


@contextlib.contextmanager
def held_up(store: SQLiteStore) -> Iterator[None]:
    """Nothing is saved during a drop."""
    gate = Latch()
    store.submit(lambda connection: gate.wait())
    try:
        yield
    finally:
        gate.set()


@pytest.mark.asyncio
async def test_only_what_changed_is_written(tmp_path: Path) -> None:
    async with learned(tmp_path) as (engine, store, history):
        await history.learning.save()
        states = {namespace: engine.estimator_state(namespace) for namespace in "ab"}
        assert store.estimators() == states
        written: list[str] = []
        store.submit(lambda connection: connection.set_trace_callback(written.append)).result()
        await history.learning.save()
        assert not any("estimators" in sql for sql in written)
        teach(engine, "b")
        await history.learning.save()
        assert sum("REPLACE INTO estimators" in sql for sql in written) == 1
        assert store.estimators() == {"a": states["a"], "b": engine.estimator_state("b")}
        assert store.estimators() != states


@pytest.mark.asyncio
async def test_a_store_that_fails_costs_the_save_alone(tmp_path: Path) -> None:
    async with learned(tmp_path) as (engine, store, history):
        store.submit(failing).result()
        with capture_logs() as logs:
            await history.learning.save()
        assert [entry["event"] for entry in logs] == ["estimator not saved"]
        assert "the disk is full" in logs[0]["reason"]
        assert history.counts.store_errors == 1
        assert store.estimators() == {}
        teach(engine, "a")
        store.submit(lambda connection: connection.execute("DROP TRIGGER fail")).result()
        await history.learning.save()
        assert store.estimators() == {namespace: engine.estimator_state(namespace) for namespace in "ab"}


@pytest.mark.asyncio
@pytest.mark.parametrize("first", ["save", "drop"])
async def test_a_namespace_dropped_while_it_is_saved_stays_dropped(first: str, tmp_path: Path) -> None:
    async with learned(tmp_path) as (engine, store, history):
        with held_up(store):
            both = [history.learning.save(), history.drop("a")]
            tasks = []
            for work in both if first == "save" else both[::-1]:
                tasks.append(asyncio.ensure_future(work))
                for _ in range(10):
                    await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await history.learning.save()
        assert set(store.estimators()) == {"b"}
        teach(engine, "a")  # later learning is kept
        await history.learning.save()
        assert set(store.estimators()) == {"a", "b"}


@pytest.mark.asyncio
async def test_a_drop_whose_caller_leaves_is_done_all_the_same(tmp_path: Path) -> None:
    async with learned(tmp_path) as (engine, store, history):
        await history.learning.save()
        with held_up(store):
            dropping = asyncio.ensure_future(history.drop("a"))
            await asyncio.sleep(0)  # the drop begins
            dropping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropping
    assert "a" not in engine.stats()["namespaces"]
    again = SQLiteStore(tmp_path, 8)
    assert set(again.estimators()) == {"b"}
    again.close()


@pytest.mark.asyncio
async def test_a_store_that_cannot_be_read_is_said_and_survived(tmp_path: Path) -> None:
    class Unreadable(SQLiteStore):
        def estimators(self) -> dict[str, bytes]:
            raise StoreError("store: disk I/O error")

    store = Unreadable(tmp_path, 8)
    engine = Engine(1 << 26)
    with capture_logs() as logs:
        async with opened(store, engine):
            assert engine.stats()["namespaces"] == {}
    assert logs[0]["event"] == "saved estimators cannot be read; drafting starts from the defaults"
