"""What every store promises, asked of each one: SQLite, Redis, and a Redis Cluster."""

import threading

import pytest

from histospec.server.redis_servers import Location
from histospec.server.redis_store import RedisStore
from histospec.server.sqlite_store import SQLiteStore
from histospec.server.store import Batch, Problem, Record


@pytest.fixture(params=["sqlite", "redis", "cluster"])
def open_store(request, tmp_path):
    """open_store(history_epochs=8) opens the same store again and again; what one wrote the next one has."""
    stores = []
    url = None
    if request.param != "sqlite":
        url = request.getfixturevalue("redis_server" if request.param == "redis" else "redis_cluster").url

    def open_(history_epochs: int = 8):
        if url is None:
            store = SQLiteStore(tmp_path, history_epochs)
        else:
            store = RedisStore(Location.parse(url), history_epochs, "shard-0")
        stores.append(store)
        return store

    yield open_
    for store in stores:
        if store._writer._thread.is_alive():
            store.close()


def batch(tokens: bytes, epoch: int = 0, prompt: bytes = b"prompt..", namespace: str = "run", name: str = "") -> Batch:
    return Batch(Problem(namespace, prompt, name), [Record(tokens, epoch)])


def put(store, *args: object, **fields: object) -> None:
    store.append(batch(*args, **fields)).result()


def test_a_record_comes_back_as_it_was(open_store):
    problem = Problem("ns ❤", b"\0\1\2\3" * 9, "a name")
    records = [
        Record(b"1234", 2**62, -0.5, b"5678", b"\1"),
        Record(b"12345678", 2**62),
        Record(b"0000", 2**62, 0.0),
        Record(bytes(range(128)), 2**62, None, bytes(128), bytes([0, 1, 1] * 10 + [1, 0])),
    ]
    store = open_store()
    store.append(Batch(problem, records)).result()
    assert store.history(problem) == records
    assert store.history(problem, 2) == records[-2:]
    store.close()
    store = open_store()
    assert store.history(problem) == records
    assert list(store.load()) == [Batch(problem, records)]
    assert store.newest_epochs() == {"ns ❤": 2**62}
    assert store.count() == 4


def test_namespaces_and_names_keep_problems_apart(open_store):
    store = open_store()
    for number, (namespace, name) in enumerate([("a", ""), ("b", ""), ("a", "x"), ("a", "y")]):
        put(store, bytes(4 * (number + 1)), namespace=namespace, name=name)
    for number, (namespace, name) in enumerate([("a", ""), ("b", ""), ("a", "x"), ("a", "y")]):
        assert [len(r.tokens) for r in store.history(Problem(namespace, b"prompt..", name))] == [4 * (number + 1)]
    assert store.drop("a").result() == 3
    assert store.count() == 1
    assert store.history(Problem("a", b"prompt..", "x")) == []
    put(store, b"anew", namespace="a", name="x")
    assert [r.tokens for r in store.history(Problem("a", b"prompt..", "x"))] == [b"anew"]


def test_a_rewind_forgets_newer_epochs(open_store):
    store = open_store()
    for epoch in range(5):
        put(store, b"aaaa", epoch)
        put(store, b"bbbb", epoch, prompt=b"another.")
        put(store, b"cccc", epoch, namespace="other")
    assert store.rewind("run", 2).result() == 4
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [0, 1, 2]
    assert [r.epoch for r in store.history(Problem("run", b"another."))] == [0, 1, 2]
    assert store.newest_epochs() == {"run": 2, "other": 4}
    assert store.rewind("run", 2).result() == 0
    put(store, b"anew", 3)
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))][-1] == b"anew"
    assert store.newest_epochs() == {"run": 3, "other": 4}


def test_a_named_problem_gathers_its_prompts_and_forgets_those_of_old_epochs(open_store):
    store = open_store(history_epochs=2)
    for epoch in range(6):
        put(store, bytes([epoch] * 4), epoch, prompt=bytes([epoch] * 8), name="p")
    assert [r.epoch for r in store.history(Problem("run", b"any.", "p"))] == [4, 5]


def test_the_window_counts_epochs_that_the_problem_has_seen(open_store):
    store = open_store(history_epochs=2)
    for epoch in (0, 10, 10, 3, 20):
        put(store, b"aaaa", epoch)
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [10, 10, 20]
    put(store, b"late", 1)  # older than all that are kept: it leaves at once
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [10, 10, 20]
    store.close()
    store = open_store(history_epochs=2)  # which has yet to find out what is there
    put(store, b"bbbb", 30)
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [20, 30]


def test_many_threads_lose_nothing(open_store):
    store = open_store()

    def append(thread: int) -> None:
        waiting = [store.append(batch(bytes([thread, i, 0, 0]), prompt=bytes([i % 7] * 4))) for i in range(100)]
        for future in waiting:
            future.result()

    threads = [threading.Thread(target=append, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = {r.tokens for i in range(7) for r in store.history(Problem("run", bytes([i] * 4)))}
    assert len(kept) == 800


def test_what_was_asked_for_is_done_though_nobody_waits(open_store):
    store = open_store()
    waiting = [store.append(batch(bytes([i] * 4))) for i in range(50)]
    assert not waiting[-1].cancel()
    store.close()
    assert [r.tokens for r in open_store().history(Problem("run", b"prompt.."))] == [bytes([i] * 4) for i in range(50)]


def test_the_last_estimator_of_each_namespace_is_kept(open_store):
    store = open_store()
    assert store.estimators() == {}
    store.save_estimator("a", b"first").result()
    store.save_estimator("b ❤", bytes(range(256))).result()
    store.save_estimator("a", b"second").result()
    assert store.estimators() == {"a": b"second", "b ❤": bytes(range(256))}
    store.save_estimator("a", b"third")
    store.drop("a").result()
    store.close()
    assert open_store().estimators() == {"b ❤": bytes(range(256))}
