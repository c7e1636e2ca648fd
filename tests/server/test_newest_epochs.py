"""What a shard hears of the epochs that others have seen."""

import asyncio
import threading

import pytest
import pytest_asyncio
from batches import put
from structlog.testing import capture_logs

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history import epoch_watch
from histospec.server.history.history import History
from histospec.server.stores.sqlite.store import SQLiteStore

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def both(tmp_path, monkeypatch):
    """A history that takes its store for a shared one, and the store, which holds epoch 5 of `run`."""
    monkeypatch.setattr(SQLiteStore, "whole_at_start", False)
    monkeypatch.setattr(epoch_watch, "WATCH_SECONDS", 0.01)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"aaaa", 5)
    engine = Engine(1 << 26)
    history = History(engine, store, 4096)
    await history.load()
    yield history, store
    await history.close()


async def until(condition) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 60)


async def test_what_others_store_is_heard_of(both):
    history, store = both
    assert history.epochs.newest("run") == 5
    put(store, b"bbbb", 9)
    put(store, b"bbbb", 3, namespace="new")
    await until(lambda: (history.epochs.newest("run"), history.epochs.newest("new")) == (9, 3))


@pytest.mark.parametrize("back", ["rewind", "drop"])
async def test_what_was_read_before_a_rewind_or_drop_does_not_count(both, back, monkeypatch):
    history, store = both
    reading, gate, read = threading.Event(), threading.Event(), store.newest_epochs
    left = []

    def slowly():
        found = read()
        reading.set()
        gate.wait()
        left.append(found)
        return found

    monkeypatch.setattr(store, "newest_epochs", slowly)
    await asyncio.to_thread(reading.wait)
    await (history.rewind("run", 2) if back == "rewind" else history.drop("run"))
    monkeypatch.setattr(store, "newest_epochs", read)
    gate.set()
    await until(lambda: left)
    assert left[0] == {"run": 5}
    await asyncio.sleep(0.1)  # a few more looks
    assert history.epochs.newest("run") == (2 if back == "rewind" else 0)


async def test_a_store_that_is_away_is_said_once_and_asked_again(both, monkeypatch):
    history, store = both
    asked, read = [], store.newest_epochs

    def away():
        asked.append(1)
        raise StoreError("the store is away")

    with capture_logs() as logs:
        monkeypatch.setattr(store, "newest_epochs", away)
        await until(lambda: len(asked) > 10)
        monkeypatch.setattr(store, "newest_epochs", read)
        put(store, b"bbbb", 9)
        await until(lambda: history.epochs.newest("run") == 9)
    assert [entry["event"] for entry in logs] == ["the newest epochs of other shards are not known"]
