"""Large deletions from a SQLite store: in slices, beside other writes, through a crash, by age."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite import writes as sqlite_writes
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.server.stores.sqlite.writes import forget_old
from tests.server.stores.conftest import OpenSQLite
from tests.support.ages import age, forgotten_down_to, vouch
from tests.support.batches import batch, put
from tests.support.contents import rows, to_load
from tests.support.waiting import Latch, eventually


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every large deletion take as many transactions as possible."""
    monkeypatch.setattr(sqlite_writes, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(sqlite_writes, "DELETED_AT_ONCE", 2)


def gone(store: SQLiteStore | SQLiteSnapshot, namespace: str) -> bool:
    return all(b.problem.namespace != namespace for b in to_load(store)) and not list(store.problems(namespace))


@pytest.mark.parametrize("long", ["drop", "rewind", "window"])
def test_other_writes_go_on_while_much_is_deleted(open_store: OpenSQLite, one_at_a_time: None, long: str) -> None:
    """A drop takes effect at once, for readers and for later writes."""
    store = open_store(history_epochs=1)
    store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([i] * 4), 1) for i in range(100)])).result()
    put(store, b"aaaa", 1, prompt=b"another.")
    gate = Latch()
    store.submit(lambda connection: gate.wait())
    order = []
    starts: dict[str, Callable[[], Future[Any]]] = {
        "drop": lambda: store.drop("run"),
        "rewind": lambda: store.rewind("run", 0),
        "window": lambda: store.append(batch(b"next", 2)),
    }
    deleting = starts[long]()
    deleting.add_done_callback(lambda _: order.append("deleted"))
    seen: list[int] = []

    def look(connection: sqlite3.Connection) -> None:
        seen.append(connection.execute("SELECT count(*) FROM responses WHERE epoch = 1").fetchone()[0])

    others = [store.submit(look) for _ in range(3)]
    others[-1].add_done_callback(lambda _: order.append("others"))
    anew = store.append(batch(b"anew", 2))
    gate.set()
    anew.result()
    if long != "window":
        assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"anew"]
        assert [b.records for b in to_load(store)] == [[Record(b"anew", 2)]]
        assert deleting.result() == 101
    deleting.result()
    assert order[0] == "others"
    assert min(seen) > 50  # other writes happened in between
    assert {r.tokens for r in store.history(Problem("run", b"prompt.."))} <= {b"next", b"anew"}
    assert rows(store, "SELECT count(*) FROM leaving") == [(0,)]
    assert store.count() == (3 if long == "window" else 1)


@pytest.mark.parametrize("long", ["drop", "rewind"])
def test_a_crash_amid_a_deletion_brings_nothing_back(tmp_path: Path, long: str) -> None:
    """
    1. A process deletes a namespace in slices, and is killed after a few of them.
    2. In the next store, readers see nothing of it, and the store deletes the rest.
    """
    code = f"""
import os, pathlib, sys
from histospec.server.stores.sqlite import writes as sqlite_writes
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.server.stores.sqlite.writes import forget_old
from histospec.server.stores.interface import ResponseBatch, Problem, Record
sqlite_writes.SLICE_SECONDS, sqlite_writes.DELETED_AT_ONCE = 0.0, 2
store = SQLiteStore(pathlib.Path(sys.argv[1]), 8)
store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([i] * 4), 1) for i in range(100)])).result()
store.{"drop('run')" if long == "drop" else "rewind('run', 0)"}
for _ in range(3):
    store.append(ResponseBatch(Problem("other", b"prompt.."), [Record(b"kept", 1)])).result()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd="/", timeout=60).returncode == -9
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        (left,) = connection.execute("SELECT count(*) FROM responses WHERE tokens != CAST('kept' AS BLOB)").fetchone()
    assert 0 < left < 100  # otherwise the crash came too late
    snapshot = SQLiteSnapshot(tmp_path)
    assert gone(snapshot, "run")
    snapshot.close()
    store = SQLiteStore(tmp_path, 8)
    assert gone(store, "run")
    eventually(lambda: store.count() == 3, "what was dropped is not deleted")
    eventually(lambda: rows(store, "SELECT count(*) FROM leaving") == [(0,)], "its note stays")
    put(store, b"anew", prompt=b"prompt..")
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"anew"]
    store.close()


def test_closing_finishes_what_is_being_deleted(open_store: OpenSQLite, one_at_a_time: None) -> None:
    store = open_store()
    store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([i] * 4), 1) for i in range(100)])).result()
    dropping = store.drop("run")
    store.close()
    assert dropping.result(0) == 100


def test_what_is_old_is_forgotten_in_slices(open_store: OpenSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems whose age is known by an evenly running clock are deleted; a named one as a whole."""
    monkeypatch.setattr(sqlite_writes, "SLICE_SECONDS", 0.0)
    store = open_store()
    for number in range(1200):
        store.append(batch(b"aaaa", prompt=number.to_bytes(4, "big")))
    for name in ("a", "b"):
        for prompt in (b"old.", b"new."):
            put(store, prompt, prompt=prompt, name=name)
    put(store, b"aaaa", namespace="other")
    age(store, "namespace = 'run' AND NOT (problem = 'b' AND tokens = CAST('new.' AS BLOB))", 100)
    age(store, "namespace = 'other'", 30)
    vouch(store)
    store.close()
    store = open_store(retention=60.0)
    assert forgotten_down_to(store, 3)
    assert {(p.name, r.tokens) for p, records in store.problems("run") for r in records} == {
        ("b", b"old."),
        ("b", b"new."),
    }
    counts = [rows(store, f"SELECT count(*) FROM {table}") for table in ("prompts", "writes")]
    assert counts == [[(3,)], [(3,)]]


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_looking_for_old_prompts_does_not_grow_with_the_prompts_of_a_name(
    open_store: OpenSQLite, monkeypatch: pytest.MonkeyPatch, seconds: float, alive: bool
) -> None:
    """Counted in steps of SQLite's virtual machine, compared with as many problems without a name, in any slices."""
    monkeypatch.setattr(sqlite_writes, "SLICE_SECONDS", seconds)
    store = open_store()
    steps = []
    for name in ("", "named"):
        for number in range(400):
            store.append(batch(b"aaaa", prompt=number.to_bytes(4, "big"), name=name))
        age(store, f"problem = '{name}'", 100)
        if alive:
            put(store, b"aaaa", prompt=b"another.", name=name)
        counted: list[int] = []

        def count(connection: sqlite3.Connection, counted: list[int] = counted) -> None:
            connection.set_progress_handler(lambda: counted.append(1), 10)

        store.submit(count).result()
        forgetting: Future[int] = store.submit(partial(forget_old, store._slice, time.time() - 50))
        assert forgetting.result() == (0 if alive and name else 400)
        steps.append(len(counted))
        store.submit(lambda connection: connection.set_progress_handler(None, 0)).result()
    assert 0 < steps[1] < 2 * steps[0]
