"""The SQLite store on its own: identity, windows, groups, settings."""

import random
import sqlite3
import threading
import tracemalloc
from pathlib import Path

import pytest

from histospec.server.errors import StoreBusy, StoreError, StoreFull
from histospec.server.stores.interface import WAITING_BYTES, Problem, Record, ResponseBatch
from histospec.server.stores.sqlite import reader as sqlite_reader
from histospec.server.stores.sqlite import writes as sqlite_writes
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.server.stores.conftest import OpenSQLite
from tests.support.batches import batch, put
from tests.support.contents import rows, to_load
from tests.support.waiting import Latch


def test_prompts_of_one_digest_are_two_problems(open_store: OpenSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sqlite_reader, sqlite_writes):
        monkeypatch.setattr(module, "digest_of", lambda tokens: b"the same")
    store = open_store()
    put(store, b"aaaa", prompt=b"one.")
    put(store, b"bbbb", prompt=b"two.")
    put(store, b"cccc", prompt=b"one.")
    assert [r.tokens for r in store.history(Problem("run", b"one."))] == [b"aaaa", b"cccc"]
    assert [r.tokens for r in store.history(Problem("run", b"two."))] == [b"bbbb"]


def test_prompts_without_responses_are_forgotten(open_store: OpenSQLite) -> None:
    store = open_store(history_epochs=2)
    for epoch in range(6):
        put(store, bytes([epoch] * 4), epoch, prompt=bytes([epoch] * 8), name="p")
    assert rows(store, "SELECT count(*) FROM prompts") == [(2,)]


def test_the_store_keeps_no_prompts_in_memory(open_store: OpenSQLite) -> None:
    store = open_store()
    tracemalloc.start()
    for number in range(30):
        put(store, b"aaaa", prompt=bytes([number]) * 2**20)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 6 * 2**20


def test_pages_have_bounded_bytes(open_store: OpenSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest come first; a response that alone has more is a page of its own."""
    store = open_store()
    sizes = [40, 400, 400, 4000, 40, 400, 40, 40]
    for number, size in enumerate(sizes):
        put(store, bytes([number]) * size)
    problem = Problem("run", b"prompt..")
    assert [len(record.tokens) for page in store.pages(problem) for record in page] == sizes
    monkeypatch.setattr(sqlite_reader, "PAGE_BYTES", 1000)
    pages = [[len(record.tokens) for record in page] for page in store.pages(problem)]
    assert pages == [[40, 400, 40, 40], [4000], [40, 400, 400]]
    assert [record for page in reversed(list(store.pages(problem))) for record in page] == store.history(problem)


def test_what_is_wanted_most_is_loaded_first(open_store: OpenSQLite) -> None:
    """First the run with the latest write; in it the newest epoch; of that, the latest write."""
    store = open_store()
    for epoch, prompt, namespace in (
        (90, b"finished", "old"),
        (3, b"newest..", "run"),
        (2, b"late....", "run"),
        (3, b"latest..", "run"),
        (1, b"mid-way.", "run"),
    ):
        put(store, b"aaaa", epoch, prompt=prompt, namespace=namespace)
    order = [batch.problem.prompt for batch in to_load(store)]
    assert order == [b"latest..", b"newest..", b"late....", b"mid-way.", b"finished"]


def test_a_problem_is_loaded_with_all_of_its_responses(open_store: OpenSQLite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order and the number of pieces do not matter; concurrent writes may be included or not."""
    monkeypatch.setattr(sqlite_reader, "ROWS", 4)
    monkeypatch.setattr(sqlite_reader, "PROBLEMS_AT_ONCE", 3)
    store = open_store()
    rng = random.Random(0)
    expected: dict[Problem, list[Record]] = {}
    for number in range(200):
        name = rng.choice(["", "named"])
        problem = Problem("run", bytes([rng.randrange(12)] * 8), name)
        record = Record(number.to_bytes(4, "big"), rng.randrange(5))
        store.append(ResponseBatch(problem, [record])).result()
        expected.setdefault(problem.identity, []).append(record)
    loading = to_load(store)
    found = {first.problem.identity: first.records for first in [next(loading)]}
    put(store, b"mean", 4, namespace="meanwhile")
    found |= {batch.problem.identity: batch.records for batch in loading}
    assert found == {p: sorted(records, key=lambda r: r.epoch) for p, records in expected.items()}


def test_of_more_epochs_than_are_wanted_now_the_newest_are_loaded(open_store: OpenSQLite) -> None:
    """All writes are acknowledged; the surplus leaves the store with the problem's next epoch."""
    store = open_store()
    for epoch in (0, 3, 5, 5, 9):
        put(store, b"aaaa", epoch)
    store.close()
    store = open_store(history_epochs=2)
    assert [[r.epoch for r in some.records] for some in to_load(store)] == [[5, 5, 9]]
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [0, 3, 5, 5, 9]
    put(store, b"aaaa", 10)
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [9, 10]


def test_a_snapshot_stays_as_it_was_while_the_store_is_written_to(open_store: OpenSQLite, tmp_path: Path) -> None:
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


def test_many_threads_share_transactions_and_lose_nothing(open_store: OpenSQLite) -> None:
    store = open_store()
    syncs = []
    store.submit(lambda connection: connection.set_trace_callback(lambda sql: syncs.append(sql))).result()

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


def test_one_that_fails_does_not_spoil_its_group(open_store: OpenSQLite) -> None:
    store = open_store()
    gate = Latch()
    store.submit(lambda connection: gate.wait())  # blocks the writer, so that the next three form one group
    good, bad, other = (store.append(batch(b"good")), store.append(batch(b"none", 2**64)), store.append(batch(b"fine")))
    gate.set()
    good.result()
    other.result()
    with pytest.raises(StoreError, match="out of range"):
        bad.result()
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"good", b"fine"]


def test_a_writer_that_is_too_far_behind_refuses(open_store: OpenSQLite) -> None:
    store = open_store(max_backlog=1 << 20)
    gate = Latch()
    store.submit(lambda connection: gate.wait())
    accepted = store.append(batch(bytes(900 << 10)))
    with pytest.raises(StoreFull, match=r"more than 1MiB \(--max-backlog\) would wait to be written; try later"):
        store.append(batch(bytes(200 << 10))).result()
    gate.set()
    accepted.result()
    put(store, bytes(200 << 10))
    put(store, bytes(2 << 20))  # larger than the limit, but alone


def test_small_responses_that_wait_count_with_the_memory_that_each_takes(open_store: OpenSQLite) -> None:
    store = open_store(max_backlog=1 << 20)
    gate = Latch()
    store.submit(lambda connection: gate.wait())
    futures = [store.append(batch(b"aaaa", prompt=number.to_bytes(4, "big"))) for number in range(1000)]
    gate.set()
    refused = sum(isinstance(future.exception(), StoreBusy) for future in futures)
    assert 1000 - refused <= (1 << 20) / WAITING_BYTES
    assert store.count() == 1000 - refused


def test_a_file_grows_to_its_limit_and_what_leaves_makes_room(open_store: OpenSQLite, tmp_path: Path) -> None:
    store = open_store(history_epochs=3, disk=4 << 20)
    full = pytest.raises(StoreFull, match=r"the file has reached its limit \(--disk 4MiB\); the request is refused")
    with full:
        for number in range(100):
            put(store, bytes(100 << 10), prompt=bytes([number] * 8), namespace="other")
    assert number > 30
    assert store.count() == number
    put(store, b"tiny")  # there is room for that
    store.drop("other").result()
    for epoch in range(50):
        put(store, bytes(1 << 20), epoch)  # the fourth replaces the first
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [47, 48, 49]
    with full:
        put(store, bytes(1 << 20), prompt=b"another.")
    store.rewind("run", 47).result()
    put(store, bytes(1 << 20), prompt=b"another.")
    store.close()
    assert (tmp_path / FILE_NAME).stat().st_size <= 4 << 20
    store = open_store(disk=1 << 20)  # less than the file has: nothing is lost, and nothing fits
    with pytest.raises(StoreFull, match="--disk 1MiB"):
        put(store, bytes(2 << 20), namespace="other")
    assert store.count() == 2


def test_what_an_append_asks_does_not_grow_with_its_problem(open_store: OpenSQLite) -> None:
    """Counted in steps of SQLite's virtual machine, with 64 responses and with 4,096, a full window."""
    steps = []
    for limit in (64, 4096):
        store = open_store(history_responses=limit, history_epochs=3)
        problem = Problem(f"run-{limit}", b"prompt..")
        store.append(ResponseBatch(problem, [Record(b"aaaa", 0) for _ in range(limit)])).result()
        put(store, b"bbbb", 0, namespace=problem.namespace)
        counted: list[int] = []

        def count(connection: sqlite3.Connection, counted: list[int] = counted) -> None:
            connection.set_progress_handler(lambda: counted.append(1), 10)

        store.submit(count).result()
        for _ in range(20):
            put(store, b"bbbb", 0, namespace=problem.namespace)
        steps.append(len(counted))
        store.close()
    assert 0 < steps[1] < 1.5 * steps[0]


def test_what_an_append_asks_does_not_grow_with_the_prompts_of_its_name(open_store: OpenSQLite) -> None:
    """Each append pushes the oldest epoch out, with 16 prompts and with 1,024 of a newer epoch."""
    steps = []
    for prompts in (16, 1024):
        store = open_store(history_epochs=3)
        for epoch in (1, 2):
            put(store, b"aaaa", epoch, name=f"{prompts}")
        for number in range(prompts):
            store.append(batch(b"aaaa", 1000, prompt=number.to_bytes(4, "big"), name=f"{prompts}"))
        put(store, b"aaaa", 3, name=f"{prompts}")
        counted: list[int] = []

        def count(connection: sqlite3.Connection, counted: list[int] = counted) -> None:
            connection.set_progress_handler(lambda: counted.append(1), 10)

        store.submit(count).result()
        for epoch in range(4, 24):
            put(store, b"aaaa", epoch, prompt=bytes([epoch] * 8), name=f"{prompts}")
        steps.append(len(counted))
        assert rows(store, f"SELECT count(*) FROM prompts WHERE problem = '{prompts}'") == [(prompts + 2,)]
        store.close()
    assert 0 < steps[1] < 1.5 * steps[0]


@pytest.mark.parametrize("known", [1, 1000])
def test_the_newest_responses_of_names_with_many_prompts_stay(
    open_store: OpenSQLite, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """Also of several names whose windows do not fit into memory together; no prompt stays without a response."""
    monkeypatch.setattr(sqlite_writes, "KNOWN_RESPONSES", known)
    rng = random.Random(0)
    store = open_store(history_epochs=3, history_responses=16)
    held: dict[str, list[tuple[int, int, int]]] = {"a": [], "b": [], "c": []}
    for number in range(600):
        name, epoch, prompt = rng.choice("abc"), number // 60 + rng.randrange(3), rng.randrange(12)
        put(store, number.to_bytes(4, "big"), epoch, prompt=bytes([prompt] * 8), name=name)
        everything = sorted([*held[name], (epoch, number, prompt)])
        newest = sorted({epoch for epoch, _, _ in everything})[-3:]
        kept = [one for one in everything if one[0] in newest]
        held[name] = kept if len(kept) <= 18 else kept[-16:]
        found = [(r.epoch, int.from_bytes(r.tokens, "big")) for r in store.history(Problem("run", b"", name))]
        assert found == [one[:2] for one in held[name]][-16:]
    prompts = sum(len({prompt for _, _, prompt in some}) for some in held.values())
    assert rows(store, "SELECT count(*) FROM prompts") == [(prompts,)]
    assert rows(store, "SELECT count(*) FROM responses") == [(sum(map(len, held.values())),)]


def test_a_rewind_leaves_no_prompt_without_responses(open_store: OpenSQLite) -> None:
    store = open_store()
    for epoch in (1, 2):
        put(store, b"aaaa", epoch, prompt=bytes([epoch] * 8), name="a")
    assert store.rewind("run", 1).result() == 1
    assert rows(store, "SELECT count(*) FROM prompts") == [(1,)]


def test_a_failing_disk_is_reported_and_survived(open_store: OpenSQLite) -> None:
    store = open_store()

    def fail(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(StoreError, match="disk I/O error"):
        store.submit(fail).result()
    put(store, b"next")


def test_closing_writes_what_waits(open_store: OpenSQLite) -> None:
    store = open_store()
    waiting = [store.append(batch(bytes([i] * 4))) for i in range(200)]
    store.close()
    assert all(future.done() and future.exception() is None for future in waiting)
    assert open_store().count() == 200


def test_the_files_settings_are_the_durable_ones(open_store: OpenSQLite) -> None:
    store = open_store()
    settings = store.submit(
        lambda c: [c.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    )
    assert settings.result() == ["wal", 2]


def test_sizes_are_those_that_count_when_responses_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_reader, "SIZED_AT_ONCE", 3)
    store = SQLiteStore(tmp_path, 8)
    assert store.sizes() == {}
    sizes = {"run-0": 0, "run-1": 0}
    for number in range(10):
        namespace, name = f"run-{number % 2}", "é" * number
        one = batch(bytes(4 * number), 1, prompt=bytes([number] * 8), namespace=namespace, name=name)
        store.append(one).result()
        sizes[namespace] += one.size
    assert store.sizes() == sizes
    store.drop("run-0").result()
    assert store.sizes() == {"run-1": sizes["run-1"]}
    store.close()


@pytest.mark.parametrize("name", ["", "a name", 1000 * "\U0001f600"])
def test_the_size_of_many_small_responses_is_about_that_of_the_file(open_store: OpenSQLite, name: str) -> None:
    store = open_store()
    batches = [batch(b"aaaa", prompt=n.to_bytes(4, "big"), name=name and f"{n}{name}") for n in range(1000)]
    for future in [store.append(one) for one in batches]:
        future.result()
    [(pages,)], [(size,)] = rows(store, "PRAGMA page_count"), rows(store, "PRAGMA page_size")
    assert 0.7 < sum(one.size for one in batches) / (pages * size) < 1.1
