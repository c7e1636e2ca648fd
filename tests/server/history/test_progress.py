"""How a shard notices that epochs have gone back: a run that continues from a checkpoint."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from histospec.server.history.history import History
from histospec.server.history.namespaces import Progress
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.histories import opened

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def history(tmp_path: Path) -> AsyncIterator[History]:
    async with opened(SQLiteStore(tmp_path, 8)) as history:
        yield history


async def add(history: History, *epochs: int) -> Progress:
    """Adds two responses of each epoch, and returns what the history knows then."""
    for epoch in epochs:
        records = [Record(bytes([n, 0, 0, 0]), epoch) for n in range(2)]
        await history.add(ResponseBatch(Problem("run", b"aaaa"), records))
    return history.epochs.progress("run")


async def test_responses_behind_the_newest_are_counted_until_one_of_it_arrives(history: History) -> None:
    assert await add(history, 3, 20) == Progress(20)
    assert await add(history, 16, 17, 16) == Progress(20, 6, 17)
    assert history.epochs.progress("other") == Progress()
    assert await add(history, 20) == Progress(20)
    assert await add(history, 19) == Progress(20, 2, 19)
    assert await add(history, 21) == Progress(21)


async def test_a_rewind_counts_nothing_as_behind(history: History) -> None:
    await add(history, 20, 16, 17)
    await history.rewind("run", 17)
    assert await add(history) == Progress(17)
    assert await add(history, 18) == Progress(18)


async def test_an_import_brings_old_epochs(history: History) -> None:
    await add(history, 20)
    old = [(Problem("run", bytes([n, 0, 0, 0])), [Record(b"aaaa", 3), Record(b"bbbb", 4)]) for n in range(8)]
    assert (await history.import_lacking("run", old)).responses == 16
    assert await add(history) == Progress(20)
