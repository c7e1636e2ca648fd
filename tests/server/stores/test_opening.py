"""A store that opens while its server listens: its answers before, and that it is the opened store afterwards."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from histospec.server.errors import ConfigError, StoreOpening
from histospec.server.stores.interface import Problem, Store, StoreSize
from histospec.server.stores.opening import GivenUp, Opened, OpeningStore, Progress
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import batch
from tests.support.contents import BATCHES, STATE, content, fill
from tests.support.waiting import Latch, eventually


class Gate:
    """Opens a SQLite store once released, or raises a given error."""

    def __init__(self, directory: Path) -> None:
        self.may = Latch()
        self.error: Exception | None = None
        self.opened: list[SQLiteStore] = []
        self._directory = directory

    def __call__(self, progress: Progress) -> Opened:
        progress.report("waiting for the test")
        while not self.may.is_set():
            progress.wait(0.01)
        if self.error:
            raise self.error
        store = SQLiteStore(self._directory, 8)
        self.opened.append(store)
        return Opened(store, store.newest_epochs())


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def store(gate: Gate) -> Iterator[OpeningStore]:
    store = OpeningStore(gate)
    yield store
    gate.may.set()
    store.close()


def test_whatever_a_store_can_be_asked_goes_to_the_one_that_was_opened() -> None:
    """Methods added to the interface must be added here, too: the defaults would answer for the wrong store."""
    asked = {name for name in dir(Store) if not name.startswith("_")}
    assert asked - vars(OpeningStore).keys() == {"whole_at_start"}  # an attribute, set when the store is open


def test_nothing_is_kept_before_the_store_is_open(store: OpeningStore, gate: Gate) -> None:
    store.start()
    eventually(lambda: store.opening == "waiting for the test")
    for later in (
        store.append(batch(b"1234")),
        store.drop("run"),
        store.rewind("run", 1),
        store.save_estimator("a", b""),
    ):
        with pytest.raises(StoreOpening, match=r"store: it is not open yet \(waiting for the test\); try later"):
            later.result(0)
    for read in (store.newest_epochs, store.count, store.estimators, store.wanted_first, store.look_for_damage):
        with pytest.raises(StoreOpening):
            read()
    for read_one in (store.problems, store.estimator):
        with pytest.raises(StoreOpening):
            read_one("run")
    for read_problem in (store.history, store.pages):
        with pytest.raises(StoreOpening):
            read_problem(Problem("run", b"prompt.."))
    assert (store.waiting_bytes, store.trouble, store.retention_paused) == (0, "", "")
    assert (store.damaged_responses, store.size) == (0, StoreSize())


def test_what_it_holds_once_open_is_what_the_opened_one_holds(store: OpeningStore, gate: Gate) -> None:
    gate.may.set()
    assert store.start().result(60) == {}
    assert (store.opening, store.whole_at_start) == ("", True)
    fill(store)
    [opened] = gate.opened
    assert content(store) == content(opened)
    assert store.newest_epochs() == opened.newest_epochs() != {}
    assert store.count() == opened.count() == sum(len(b.records) for b in BATCHES) - 1  # one was rewound
    assert store.estimator("run") == STATE
    assert store.drop("run").result() > 0
    assert "run" not in opened.newest_epochs()


def test_a_store_that_can_never_be_used_says_so(store: OpeningStore, gate: Gate) -> None:
    gate.error = ConfigError("no such place")
    gate.may.set()
    with pytest.raises(ConfigError, match="no such place"):
        store.start().result(60)
    with pytest.raises(StoreOpening):
        store.count()


def test_closing_ends_the_opening(store: OpeningStore, gate: Gate) -> None:
    opened = store.start()
    eventually(lambda: store.opening == "waiting for the test")
    store.close()
    with pytest.raises(GivenUp):
        opened.result(0)
    assert gate.opened == []


def test_a_store_that_is_opened_too_late_is_closed(gate: Gate, tmp_path: Path) -> None:
    begun = Latch()

    def slowly(progress: Progress) -> Opened:
        begun.set()
        gate.may.wait()  # ignores everything, as a look-up of a name does
        return gate(Progress())

    store = OpeningStore(slowly)
    opened = store.start()
    begun.wait()
    closing = threading.Thread(target=store.close)
    closing.start()
    eventually(lambda: store._closed)
    gate.may.set()
    closing.join(60)
    with pytest.raises(GivenUp):
        opened.result(60)
    assert len(gate.opened) == 1
    SQLiteStore(tmp_path, 8).close()  # the lock is free
