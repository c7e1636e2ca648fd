"""How a shard learns the epochs that other shards have seen."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from histospec.native import Engine
from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import put
from tests.support.waiting import Latch, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[History, SQLiteStore]]:
    """Returns a history that takes its store for a shared one, and the store, which holds epoch 5 of `run`."""
    monkeypatch.setattr(SQLiteStore, "whole_at_start", False)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"aaaa", 5)
    history = History(Engine(1 << 26), store, 4096, watch_seconds=0.01)
    await history.load()
    yield history, store
    await history.close()


async def test_what_others_store_is_heard_of(both: tuple[History, SQLiteStore]) -> None:
    history, store = both
    assert history.epochs.newest("run") == 5
    put(store, b"bbbb", 9)
    put(store, b"bbbb", 3, namespace="new")
    await until(lambda: (history.epochs.newest("run"), history.epochs.newest("new")) == (9, 3))


@pytest.mark.parametrize("back", ["rewind", "drop"])
async def test_what_was_read_before_a_rewind_or_drop_does_not_count(
    both: tuple[History, SQLiteStore], back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, store = both
    reading, gate, read = Latch(), Latch(), store.newest_epochs
    left = []
    looks = []

    def slowly() -> Any:
        found = read()
        reading.set()
        gate.wait()
        left.append(found)
        return found

    def noting() -> Any:
        looks.append(read())
        return looks[-1]

    monkeypatch.setattr(store, "newest_epochs", slowly)
    await asyncio.to_thread(reading.wait)
    await (history.rewind("run", 2) if back == "rewind" else history.drop("run"))
    monkeypatch.setattr(store, "newest_epochs", noting)
    gate.set()
    await until(lambda: left)
    assert left[0] == {"run": 5}
    await until(lambda: len(looks) > 3)
    assert history.epochs.newest("run") == (2 if back == "rewind" else 0)


async def test_a_store_that_is_away_is_said_once_and_asked_again(
    both: tuple[History, SQLiteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    history, store = both
    asked, read = [], store.newest_epochs

    def away() -> None:
        asked.append(1)
        raise StoreError("the store is away")

    with capture_logs() as logs:
        monkeypatch.setattr(store, "newest_epochs", away)
        await until(lambda: len(asked) > 10)
        monkeypatch.setattr(store, "newest_epochs", read)
        put(store, b"bbbb", 9)
        await until(lambda: history.epochs.newest("run") == 9)
    assert [entry["event"] for entry in logs] == ["the newest epochs of other shards are not known"]
