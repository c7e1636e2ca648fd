"""The promises of every store, tested with SQLite, Redis and a Redis Cluster."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from histospec.server.errors import LimitExceeded
from histospec.server.stores.interface import LAST_EPOCH, Problem, Record, ResponseBatch
from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.servers import Servers
from histospec.server.stores.redis.store import RedisStore
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import batch, put
from tests.support.contents import OTHERS
from tests.support.waiting import eventually


@pytest.fixture(params=["sqlite", "redis", "cluster"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """open_store(history_epochs=8, …) opens the same store repeatedly, with its earlier contents."""
    stores: list[SQLiteStore | RedisStore] = []
    url = None
    if request.param != "sqlite":
        url = request.getfixturevalue("redis_server" if request.param == "redis" else "redis_cluster").url

    def open_(history_epochs: int = 8, **options: Any) -> SQLiteStore | RedisStore:
        if url is None:
            stores.append(SQLiteStore(tmp_path, history_epochs, **options))
        else:
            stores.append(RedisStore(Servers(lambda: Location.parse(url)), history_epochs, "shard-0", **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def test_a_record_comes_back_as_it_was(open_store: Callable[..., Any]) -> None:
    problem = Problem("ns ❤", b"\0\1\2\3" * 9, "a name")
    records = [
        Record(b"1234", 2**62, -0.5, b"5678", b"\1"),
        Record(b"12345678", 2**62),
        Record(b"0000", 2**62, 0.0),
        Record(bytes(range(128)), 2**62, None, bytes(128), bytes([0, 1, 1] * 10 + [1, 0])),
        Record(b"zero", 2**62, seed=0),
        Record(b"1234", 2**62, -0.5, b"5678", b"\1", 2**63 - 1),
        Record(b"12345678", 2**62, None, b"", b"\0\1", -(2**63)),
        Record(bytes(16), 2**62, seed=1, alternatives=OTHERS),
    ]
    store = open_store()
    store.append(ResponseBatch(problem, records)).result()
    assert store.history(problem) == records
    assert store.history(problem, 2) == records[-2:]
    store.close()
    store = open_store()
    assert store.history(problem) == records
    assert [record for page in store.pages(problem) for record in page] == records
    assert store.newest_epochs() == {"ns ❤": 2**62}
    assert store.count() == 8


def test_namespaces_and_names_keep_problems_apart(open_store: Callable[..., Any]) -> None:
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


def test_a_rewind_forgets_newer_epochs(open_store: Callable[..., Any]) -> None:
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


def test_a_named_problem_gathers_its_prompts_and_forgets_those_of_old_epochs(open_store: Callable[..., Any]) -> None:
    store = open_store(history_epochs=2)
    for epoch in range(6):
        put(store, bytes([epoch] * 4), epoch, prompt=bytes([epoch] * 8), name="p")
    assert [r.epoch for r in store.history(Problem("run", b"any.", "p"))] == [4, 5]


def test_the_window_counts_epochs_that_the_problem_has_seen(open_store: Callable[..., Any]) -> None:
    store = open_store(history_epochs=2)
    for epoch in (0, 10, 10, 3, 20):
        put(store, b"aaaa", epoch)
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [10, 10, 20]
    put(store, b"late", 1)  # older than all kept epochs: it is removed at once
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [10, 10, 20]
    store.close()
    store = open_store(history_epochs=2)  # does not yet know the contents
    put(store, b"bbbb", 30)
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [20, 30]


@pytest.mark.parametrize("name", ["", "a name"])
def test_the_newest_responses_of_a_problem_stay(open_store: Callable[..., Any], name: str) -> None:
    """The limit holds for any epochs. Readers do not see the surplus, which is kept to delete many at once."""
    store = open_store(history_responses=16)
    expected: list[tuple[int, bytes]] = []
    problem = Problem("run", b"prompt..", name)
    for number in range(0, 120, 3):
        texts = [(number + i).to_bytes(4, "big") for i in range(3)]
        epoch = 5 if number % 4 else 4  # some of them come late
        store.append(ResponseBatch(problem, [Record(text, epoch) for text in texts])).result()
        expected = sorted([*expected, *((epoch, text) for text in texts)])[-16:]
        assert [(r.epoch, r.tokens) for r in store.history(problem)] == expected
    assert [len(records) for _, records in store.problems("run")] == [16]
    assert store.history(problem, 5) == store.history(problem)[-5:]
    store.close()
    store = open_store(history_responses=16)  # does not yet know how many there are
    put(store, b"next", 5, name=name)
    assert [r.tokens for r in store.history(problem)] == [text for _, text in expected[1:]] + [b"next"]
    store.close()
    store = open_store(history_responses=4)
    assert [len(page) for page in store.pages(problem)] == [4]
    put(store, b"last", 5, name=name)
    assert [r.tokens for r in store.history(problem)][-2:] == [b"next", b"last"]
    assert store.count() == 4


def test_a_batch_beyond_the_limit_keeps_its_newest(open_store: Callable[..., Any]) -> None:
    store = open_store(history_responses=4)
    store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([i] * 4), 0) for i in range(50)])).result()
    assert [r.tokens[0] for r in store.history(Problem("run", b"prompt.."))] == [46, 47, 48, 49]


def test_a_history_that_is_too_large_for_an_answer_is_refused(open_store: Callable[..., Any]) -> None:
    store = open_store()
    problem = Problem("run", b"prompt..")
    records = [Record(bytes(4000), 0, None, bytes(4000)) for _ in range(200)]
    store.append(ResponseBatch(problem, records)).result()
    with pytest.raises(LimitExceeded, match=r"more than the limit of 1MiB \(--max-message\); ask for fewer with limit"):
        store.history(problem, 0, 1 << 20)
    assert len(store.history(problem, 100, 1 << 20)) == 100
    assert len(store.history(problem, 0, 2 << 20)) == 200


def test_counted_epochs_may_be_as_large_as_the_store_holds(open_store: Callable[..., Any]) -> None:
    store = open_store()
    put(store, b"aaaa", LAST_EPOCH)
    assert [r.epoch for r in store.history(Problem("run", b"prompt.."))] == [LAST_EPOCH]
    assert store.newest_epochs() == {"run": LAST_EPOCH}
    assert store.rewind("run", 3).result() == 1


def test_many_threads_lose_nothing(open_store: Callable[..., Any]) -> None:
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


def test_what_was_asked_for_is_done_though_nobody_waits(open_store: Callable[..., Any]) -> None:
    store = open_store()
    waiting = [store.append(batch(bytes([i] * 4))) for i in range(50)]
    assert not waiting[-1].cancel()
    store.close()
    assert [r.tokens for r in open_store().history(Problem("run", b"prompt.."))] == [bytes([i] * 4) for i in range(50)]


def test_the_last_estimator_of_each_namespace_is_kept(open_store: Callable[..., Any]) -> None:
    store = open_store()
    assert store.estimators() == {}
    store.save_estimator("a", b"first").result()
    store.save_estimator("b ❤", bytes(range(256))).result()
    store.save_estimator("a", b"second").result()
    assert store.estimators() == {"a": b"second", "b ❤": bytes(range(256))}
    store.save_estimator("a", b"third")
    assert (store.estimator("b ❤"), store.estimator("c")) == (bytes(range(256)), None)
    assert store.newest_epochs() == {"a": 0, "b ❤": 0}
    store.drop("a").result()
    store.close()
    assert open_store().estimators() == {"b ❤": bytes(range(256))}


def test_a_walk_meets_every_problem_once(open_store: Callable[..., Any]) -> None:
    store = open_store()
    names = [f"p{number % 40}" for number in range(1200)]  # more than a page of prompts, with few names
    writing = [
        store.append(batch(n.to_bytes(4, "big"), prompt=bytes([n % 251] * 8), name=x)) for n, x in enumerate(names)
    ]
    writing += [store.append(batch(b"aaaa", epoch, prompt=bytes([n] * 8))) for epoch in (1, 0) for n in range(30)]
    writing += [store.append(batch(b"bbbb", namespace="other")), store.append(batch(b"cccc", 5, prompt=b"gone"))]
    for future in writing:
        future.result()
    store.rewind("run", 1).result()
    walked = dict(store.problems("run"))
    assert len(list(store.problems("run"))) == len(walked) == 70
    assert {p.name: len(r) for p, r in walked.items() if p.name} == {f"p{i}": 30 for i in range(40)}
    assert all([r.epoch for r in records] == [0, 1] for p, records in walked.items() if not p.name)
    assert all(store.history(problem) == records for problem, records in walked.items())
    assert [(p.namespace, r) for p, r in store.problems("other")] == [("other", [Record(b"bbbb", 0)])]
    assert list(store.problems("absent")) == []
    assert store.count() == 1261


def test_a_problem_that_nobody_writes_to_is_forgotten(open_store: Callable[..., Any]) -> None:
    store = open_store(retention=3.0)
    store.save_estimator("run", b"learned").result()
    for number in range(20):
        put(store, b"gone", 4, prompt=bytes([number] * 8))
    put(store, b"gone", prompt=b"1st.", name="old")
    stays = [Problem("run", b"stays..."), Problem("run", b"2nd.", "new")]

    def only_these_are_left() -> bool:
        for problem in stays:
            store.append(ResponseBatch(problem, [Record(b"kept", 2)])).result()
        return {problem for problem, _ in store.problems("run")} == set(stays)

    eventually(only_these_are_left, "they are not forgotten")
    assert all({r.tokens for r in store.history(problem)} == {b"kept"} for problem in stays)
    assert store.history(Problem("run", bytes(8))) == []
    assert store.estimators() == {"run": b"learned"}
    assert store.newest_epochs() == {"run": 4}
    eventually(lambda: store.count() == 0, "the rest is not forgotten")
    store.close()
    store = open_store()
    put(store, b"anew", 4, prompt=bytes(8))  # as if it had never existed
    assert [(p, r) for p, r in store.problems("run")] == [(Problem("run", bytes(8)), [Record(b"anew", 4)])]


def test_without_retention_what_had_one_stays(open_store: Callable[..., Any]) -> None:
    store = open_store(retention=5.0)
    put(store, b"aaaa")
    put(store, b"aaaa", prompt=b"another.")
    store.close()
    store = open_store()
    put(store, b"bbbb")
    time.sleep(6)  # longer than its retention
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"aaaa", b"bbbb"]


def test_the_answer_counts_responses_too_old_to_keep(open_store: Callable[..., Any]) -> None:
    """Each batch is answered for itself, also if one transaction or round trip stores several."""
    store = open_store(history_epochs=2, history_responses=8)
    waiting = [store.append(batch(b"aaaa", epoch)) for epoch in (5, 6, 3, 7, 5)]
    assert [done.result() for done in waiting][1:4] == [0, 1, 0]
    problem = Problem("run", b"prompt..")
    for epoch, too_old in ((4, 2), (6, 0), (7, 0)):
        records = [Record(b"old ", epoch)] * 2
        assert store.append(ResponseBatch(problem, records)).result() == too_old
    assert {record.epoch for record in store.history(problem)} == {6, 7}
    assert store.append(ResponseBatch(problem, [Record(b"many", 7)] * 8)).result() == 0
    assert store.append(batch(b"old ", 6)).result() in (0, 1)  # Redis may keep an eighth more
    assert store.append(batch(b"more", 5)).result() == 1
