"""How a shard learns the epochs that other shards have seen."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from histospec.server.errors import StoreError
from histospec.server.history.history import History
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import put
from tests.support.histories import opened
from tests.support.waiting import Latch, until

pytestmark = pytest.mark.asyncio


class SharedStore(SQLiteStore):
    """A store that other shards write to. `newest_epochs` returns what it has read when `gate` is set."""

    whole_at_start = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 8)
        self.gate = Latch()
        self.gate.set()
        self.reading = Latch()
        self.reads = 0
        self.away = False

    def newest_epochs(self) -> dict[str, int]:
        found = super().newest_epochs()
        self.reading.set()
        self.gate.wait()
        self.reads += 1
        if self.away:
            raise StoreError("the store is away")
        return found


@pytest_asyncio.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[History, SharedStore]]:
    """Returns a history and its store, which holds epoch 5 of `run`."""
    store = SharedStore(tmp_path)
    put(store, b"aaaa", 5)
    async with opened(store, watch_seconds=0.01) as history:
        yield history, store


async def test_what_others_store_is_heard_of(both: tuple[History, SharedStore]) -> None:
    history, store = both
    assert history.epochs.newest("run") == 5
    put(store, b"bbbb", 9)
    put(store, b"bbbb", 3, namespace="new")
    await until(lambda: (history.epochs.newest("run"), history.epochs.newest("new")) == (9, 3))


@pytest.mark.parametrize("back", ["rewind", "drop"])
async def test_what_was_read_before_a_rewind_or_drop_does_not_count(
    both: tuple[History, SharedStore], back: str
) -> None:
    history, store = both
    store.gate.clear()
    store.reading.clear()
    await asyncio.to_thread(store.reading.wait)
    reads = store.reads
    await (history.rewind("run", 2) if back == "rewind" else history.drop("run"))
    store.gate.set()
    await until(lambda: store.reads > reads + 2)
    assert history.epochs.newest("run") == (2 if back == "rewind" else 0)


async def test_a_store_that_is_away_is_said_once_and_asked_again(both: tuple[History, SharedStore]) -> None:
    history, store = both
    with capture_logs() as logs:
        store.away, reads = True, store.reads
        await until(lambda: store.reads > reads + 10)
        store.away = False
        put(store, b"bbbb", 9)
        await until(lambda: history.epochs.newest("run") == 9)
    assert [entry["event"] for entry in logs] == ["the newest epochs of other shards are not known"]
