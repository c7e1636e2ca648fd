"""The SQLite store on its own: identity, windows, groups, and files that are not its own."""

import hashlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from histospec.server.errors import ConfigError, StoreError, StoreFull
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.retention import Trust
from histospec.server.stores.sqlite import reader as sqlite_reader
from histospec.server.stores.sqlite import writes as sqlite_writes
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.retention import note_down
from histospec.server.stores.sqlite.snapshot import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import batch, put
from tests.support.waiting import eventually

FIRST_VERSION = """
PRAGMA application_id = 0x48495354; PRAGMA user_version = 1;
CREATE TABLE prompts (
    id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, problem TEXT NOT NULL, digest BLOB NOT NULL, tokens BLOB NOT NULL
);
CREATE INDEX prompts_by_digest ON prompts (namespace, problem, digest);
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT, prompt INTEGER NOT NULL REFERENCES prompts (id), epoch INTEGER NOT NULL,
    reward REAL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, generated BLOB NOT NULL
);
CREATE INDEX responses_by_prompt ON responses (prompt, epoch);
INSERT INTO prompts VALUES (1, 'run', '', X'DIGEST', CAST('prompt..' AS BLOB));
INSERT INTO responses VALUES (1, 1, 0, NULL, CAST('old.' AS BLOB), X'', X'');
""".replace("DIGEST", hashlib.blake2b(b"prompt..", digest_size=8).hexdigest())

# What the second and third version added, and a bit of everything in it.
THIRD_VERSION = (
    FIRST_VERSION
    + """
PRAGMA user_version = 3;
CREATE TABLE estimators (namespace TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE namespaces (namespace TEXT PRIMARY KEY, newest_epoch INTEGER NOT NULL);
CREATE TABLE writes (prompt INTEGER PRIMARY KEY REFERENCES prompts (id), latest REAL NOT NULL);
CREATE TRIGGER prompts_leave AFTER DELETE ON prompts BEGIN
    DELETE FROM responses WHERE prompt = old.id;
    DELETE FROM writes WHERE prompt = old.id;
END;
INSERT INTO estimators VALUES ('run', CAST('learned' AS BLOB));
INSERT INTO namespaces VALUES ('run', 9);
INSERT INTO writes VALUES (1, 1e9);
INSERT INTO responses VALUES (7, 1, 9, 0.5, CAST('12345678' AS BLOB), CAST('scores..' AS BLOB), X'0001');
"""
)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., SQLiteStore]]:
    stores = []

    def open_(history_epochs: int = 8, **options: Any) -> SQLiteStore:
        stores.append(SQLiteStore(tmp_path, history_epochs, **options))
        return stores[-1]

    yield open_
    for store in stores:
        if store._writer._thread.is_alive():
            store.close()


def test_prompts_of_one_digest_are_two_problems(
    open_store: Callable[..., SQLiteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite_reader, sqlite_writes):
        monkeypatch.setattr(module, "digest_of", lambda tokens: b"the same")
    store = open_store()
    put(store, b"aaaa", prompt=b"one.")
    put(store, b"bbbb", prompt=b"two.")
    put(store, b"cccc", prompt=b"one.")
    assert [r.tokens for r in store.history(Problem("run", b"one."))] == [b"aaaa", b"cccc"]
    assert [r.tokens for r in store.history(Problem("run", b"two."))] == [b"bbbb"]


def test_prompts_without_responses_are_forgotten(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store(history_epochs=2)
    for epoch in range(6):
        put(store, bytes([epoch] * 4), epoch, prompt=bytes([epoch] * 8), name="p")
    assert store._reader.execute("SELECT count(*) FROM prompts").fetchone() == (2,)


def test_load_yields_what_was_there_when_it_began(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store()
    for epoch, tokens in ((1, b"aaaa"), (0, b"bbbb"), (1, b"cccc")):
        put(store, tokens, epoch)
    loading = store.load()
    assert next(loading).records == [Record(b"bbbb", 0)]
    put(store, b"dddd", 1)
    assert [b.records for b in loading] == [[Record(b"aaaa", 1), Record(b"cccc", 1)]]


def test_a_snapshot_stays_as_it_was_while_the_store_is_written_to(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    store = open_store()
    for number in range(3):
        put(store, b"aaaa", prompt=bytes([number] * 4))
    reader = SQLiteSnapshot(tmp_path)
    walk = reader.problems("run")
    seen = [next(walk)]
    for number in range(6):
        put(store, b"bbbb", 1, prompt=bytes([number] * 4))
    store.drop("other").result()
    store.rewind("run", 0).result()
    seen += walk
    assert sorted((p.prompt, r) for p, r in seen) == [(bytes([n] * 4), [Record(b"aaaa", 0)]) for n in range(3)]
    assert reader.newest_epochs() == {"run": 0}
    with pytest.raises(StoreError, match="readonly"):
        reader._read("DELETE FROM responses")
    reader.close()
    put(store, b"cccc")


def test_many_threads_share_transactions_and_lose_nothing(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store()
    syncs = []
    store._writer.submit(lambda connection: connection.set_trace_callback(lambda sql: syncs.append(sql)), 0).result()

    def append(thread: int) -> None:
        waiting = [store.append(batch(bytes([thread, i, 0, 0]))) for i in range(100)]
        for future in waiting:
            future.result()

    threads = [threading.Thread(target=append, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({r.tokens for r in store.history(Problem("run", b"prompt.."))}) == 800
    assert syncs.count("COMMIT") < 400


def test_one_that_fails_does_not_spoil_its_group(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store()
    gate = threading.Event()
    store._writer.submit(
        lambda connection: gate.wait(), 0
    )  # holds the writer up, so that the next three form one group
    good, bad, other = (store.append(batch(b"good")), store.append(batch(b"none", 2**64)), store.append(batch(b"fine")))
    gate.set()
    good.result()
    other.result()
    with pytest.raises(StoreError, match="too large"):
        bad.result()
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"good", b"fine"]


def test_a_writer_that_is_too_far_behind_refuses(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store(max_backlog=1 << 20)
    gate = threading.Event()
    store._writer.submit(lambda connection: gate.wait(), 0)
    accepted = store.append(batch(bytes(900 << 10)))
    with pytest.raises(StoreFull, match=r"more than 1MiB \(--max-backlog\) would wait to be written; try later"):
        store.append(batch(bytes(200 << 10))).result()
    gate.set()
    accepted.result()
    put(store, bytes(200 << 10))
    put(store, bytes(2 << 20))  # larger than the limit, but alone


def test_a_file_grows_to_its_limit_and_what_leaves_makes_room(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    store = open_store(history_epochs=3, disk=4 << 20)
    full = pytest.raises(StoreFull, match=r"the file has reached its limit \(--disk 4MiB\); nothing of this request")
    with full:
        for number in range(100):
            put(store, bytes(100 << 10), prompt=bytes([number] * 8), namespace="other")
    assert number > 30
    assert store.count() == number
    put(store, b"tiny")  # there is room for that
    store.drop("other").result()
    for epoch in range(50):
        put(store, bytes(1 << 20), epoch)  # the fourth takes the place of the first
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [47, 48, 49]
    with full:
        put(store, bytes(1 << 20), prompt=b"another.")
    store.rewind("run", 47).result()
    put(store, bytes(1 << 20), prompt=b"another.")
    store.close()
    assert (tmp_path / FILE_NAME).stat().st_size <= 4 << 20
    store = open_store(disk=1 << 20)  # less than it has: nothing is lost, and nothing fits
    with pytest.raises(StoreFull, match="--disk 1MiB"):
        put(store, bytes(2 << 20), namespace="other")
    assert store.count() == 2


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every deletion of many takes as many transactions as it can."""
    monkeypatch.setattr(sqlite_writes, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(sqlite_writes, "DELETED_AT_ONCE", 2)


def gone(store: SQLiteStore | SQLiteSnapshot, namespace: str) -> bool:
    return all(b.problem.namespace != namespace for b in store.load()) and not list(store.problems(namespace))


@pytest.mark.parametrize("long", ["drop", "rewind", "window"])
def test_other_writes_go_on_while_much_is_deleted(
    open_store: Callable[..., SQLiteStore], one_at_a_time: None, long: str
) -> None:
    """It takes effect at once, for readers and for what is stored after it."""
    store = open_store(history_epochs=1)
    store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([i] * 4), 1) for i in range(100)])).result()
    put(store, b"aaaa", 1, prompt=b"another.")
    gate = threading.Event()
    store._writer.submit(lambda connection: gate.wait(), 0)
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

    others = [store._writer.submit(look, 0) for _ in range(3)]
    others[-1].add_done_callback(lambda _: order.append("others"))
    anew = store.append(batch(b"anew", 2))
    gate.set()
    anew.result()
    if long != "window":
        assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"anew"]
        assert [b.records for b in store.load()] == [[Record(b"anew", 2)]]
        assert deleting.result() == 101
    deleting.result()
    assert order[0] == "others"
    assert min(seen) > 50  # others were written between
    assert {r.tokens for r in store.history(Problem("run", b"prompt.."))} <= {b"next", b"anew"}
    assert store._read("SELECT count(*) FROM leaving") == [(0,)]
    assert store.count() == (3 if long == "window" else 1)


@pytest.mark.parametrize("long", ["drop", "rewind"])
def test_a_crash_amid_a_deletion_brings_nothing_back(tmp_path: Path, long: str) -> None:
    """
    1. A process deletes a namespace in slices, and is killed after a few of them.
    2. The next store has nothing of it for readers, and works off the rest.
    """
    code = f"""
import os, pathlib, sys
from histospec.server.stores.sqlite import writes as sqlite_writes
from histospec.server.stores.sqlite.store import SQLiteStore
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
    assert 0 < left < 100  # else the crash came too late to show anything
    snapshot = SQLiteSnapshot(tmp_path)
    assert gone(snapshot, "run")
    snapshot.close()
    store = SQLiteStore(tmp_path, 8)
    assert gone(store, "run")
    eventually(lambda: store.count() == 3, "what was dropped is not deleted")
    eventually(lambda: store._read("SELECT count(*) FROM leaving") == [(0,)], "its note stays")
    put(store, b"anew", prompt=b"prompt..")
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"anew"]
    store.close()


def test_closing_finishes_what_is_being_deleted(open_store: Callable[..., SQLiteStore], one_at_a_time: None) -> None:
    store = open_store()
    store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([i] * 4), 1) for i in range(100)])).result()
    dropping = store.drop("run")
    store.close()
    assert dropping.result(0) == 100


def test_what_an_append_asks_does_not_grow_with_its_problem(open_store: Callable[..., SQLiteStore]) -> None:
    """Counted in the virtual machine of SQLite: of 64 responses and of 4,096, whose limit is reached."""
    steps = []
    for limit in (64, 4096):
        store = open_store(history_responses=limit, history_epochs=3)
        problem = Problem(f"run-{limit}", b"prompt..")
        store.append(ResponseBatch(problem, [Record(b"aaaa", 0) for _ in range(limit)])).result()
        put(store, b"bbbb", 0, namespace=problem.namespace)
        counted: list[int] = []

        def count(connection: sqlite3.Connection, counted: list[int] = counted) -> None:
            connection.set_progress_handler(lambda: counted.append(1), 10)

        store._writer.submit(count, 0).result()
        for _ in range(20):
            put(store, b"bbbb", 0, namespace=problem.namespace)
        steps.append(len(counted))
        store.close()
    assert 0 < steps[1] < 1.5 * steps[0]


def vouch(store: SQLiteStore) -> None:
    """As if the clock had gone on evenly since 1970."""
    store._writer.submit(lambda connection: note_down(Trust(time.time(), 0.0), "", connection), 0).result()


def age(store: SQLiteStore, condition: str, seconds: float) -> None:
    """As if what meets the condition had been written so long ago."""
    text = f"UPDATE writes SET latest = latest - ? WHERE prompt IN (SELECT id FROM prompts WHERE {condition})"
    store._writer.submit(lambda connection: connection.execute(text, (seconds,)), 0).result()


def forgotten_down_to(store: SQLiteStore, responses: int) -> bool:
    """Whether retention leaves so many."""
    eventually(lambda: store.count() == responses, "retention forgets something else")
    return not store.retention_paused


def test_what_is_old_is_forgotten_in_slices(
    open_store: Callable[..., SQLiteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Problems whose age a clock that went on evenly vouches for; a named one as a whole."""
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
    counts = [store._read(f"SELECT count(*) FROM {table}") for table in ("prompts", "writes")]
    assert counts == [[(3,)], [(3,)]]


def test_retention_begins_with_the_update_of_an_old_file(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(FIRST_VERSION)
    assert open_store(retention=3600.0).count() == 1


def test_a_failing_disk_is_reported_and_survived(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store()

    def fail(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(StoreError, match="disk I/O error"):
        store._writer.submit(fail, 0).result()
    put(store, b"next")


def test_closing_writes_what_waits(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store()
    waiting = [store.append(batch(bytes([i] * 4))) for i in range(200)]
    store.close()
    assert all(future.done() and future.exception() is None for future in waiting)
    assert open_store().count() == 200


def test_the_files_settings_are_the_durable_ones(open_store: Callable[..., SQLiteStore]) -> None:
    store = open_store()
    settings = store._writer.submit(
        lambda c: [c.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")], 0
    )
    assert settings.result() == ["wal", 2]


def test_a_directory_serves_one_store_at_a_time(open_store: Callable[..., SQLiteStore], tmp_path: Path) -> None:
    store = open_store()
    with pytest.raises(ConfigError, match="another server uses it"):
        SQLiteStore(tmp_path, 8)
    store.close()
    SQLiteStore(tmp_path, 8).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from histospec.server.stores.sqlite.store import SQLiteStore;"
        "SQLiteStore(pathlib.Path(sys.argv[1]), 8); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd="/", timeout=60).returncode == -9
    SQLiteStore(tmp_path, 8).close()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.write_bytes(os.urandom(5000)), "cannot be used as a store"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE mine (x)"), "another program's database"),
        (lambda path: path.mkdir(), "cannot be used as a store"),
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, make: Callable[[Path], object], sentence: str) -> None:
    make(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match=sentence):
        SQLiteStore(tmp_path, 8)


def test_a_file_of_a_newer_version_is_left_alone(open_store: Callable[..., SQLiteStore], tmp_path: Path) -> None:
    open_store().close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 6")
    with pytest.raises(ConfigError, match=r"newer HistoSpec \(schema 6, this one knows 5\)"):
        SQLiteStore(tmp_path, 8)


def test_a_file_of_the_first_version_is_brought_up_to_date(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(FIRST_VERSION)
    store = open_store()
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"old."]
    store.save_estimator("run", b"learned").result()
    put(store, b"new.")
    store.close()
    store = open_store()
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"old.", b"new."]
    assert store.estimators() == {"run": b"learned"}


def test_a_file_from_before_seeds_keeps_everything_and_takes_seeds(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(THIRD_VERSION)
    with pytest.raises(ConfigError, match=r"older HistoSpec \(schema 3, this one needs 5\); start this server on it"):
        SQLiteSnapshot(tmp_path)
    kept = [Record(b"old.", 0), Record(b"12345678", 9, 0.5, b"scores..", b"\0\1")]
    problem = Problem("run", b"prompt..")
    store = open_store()
    assert store.history(problem) == kept
    assert (store.newest_epochs(), store.estimators()) == ({"run": 9}, {"run": b"learned"})
    assert store._read("SELECT latest FROM writes") == [(1e9,)]
    seeded = Record(b"new.", 9, seed=-5)
    store.append(ResponseBatch(problem, [seeded])).result()
    store.close()
    store = open_store()
    assert store.history(problem) == [*kept, seeded]
    assert [record for loaded in store.load() for record in loaded.records] == [*kept, seeded]
    store.close()
    store = open_store(retention=60.0)
    assert store.count() == 3
    age(store, "namespace = 'run'", 100)
    store.close()
    assert forgotten_down_to(open_store(retention=60.0), 0)  # the trigger is there


def test_an_update_that_does_not_succeed_changes_nothing(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(FIRST_VERSION + "CREATE TABLE estimators (in_the_way);")
    with pytest.raises(ConfigError, match="already exists"):
        SQLiteStore(tmp_path, 8)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT tokens FROM responses").fetchall() == [(b"old.",)]
