"""A shard forgets what another shard drops or rewinds in their common Redis."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest
import pytest_asyncio

from histospec.native import Engine
from histospec.server.history.history import History
from histospec.server.stores.interface import Problem
from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.servers import Servers
from histospec.server.stores.redis.store import RedisStore
from tests.support.batches import batch
from tests.support.histories import opened
from tests.support.redis_processes import RedisProcess
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

PROMPT = b"prompt.."
Shard = tuple[History, Engine]


@pytest_asyncio.fixture
async def shards(redis_server: RedisProcess) -> AsyncIterator[list[Shard]]:
    async with AsyncExitStack() as stack:
        shards: list[Shard] = []
        for number in range(2):
            store = RedisStore(Servers(lambda: Location.parse(redis_server.url)), 8, f"shard-{number}")
            engine = Engine(1 << 26)
            shards.append((await stack.enter_async_context(opened(store, engine, watch_seconds=0.01)), engine))
        yield shards


def indexed(shard: Shard) -> list[int]:
    """Returns the epochs of the indexed responses."""
    return [epoch for _, epoch in shard[1].history("run", np.frombuffer(PROMPT, np.int32))]


async def test_a_drop_reaches_the_index_and_the_epochs_of_every_shard(shards: list[Shard]) -> None:
    first, second = shards
    await second[0].add(batch(b"aaaa", 5, PROMPT))
    assert indexed(second) == [5]
    assert await first[0].drop("run") == 1
    await until(lambda: not indexed(second))
    await until(lambda: second[0].epochs.newest("run") == 0)
    await second[0].add(batch(b"bbbb", 1, PROMPT))
    assert indexed(second) == [1]
    assert [r.epoch for r in await first[0].get(Problem("run", PROMPT), 0, 1 << 20, list)] == [1]


async def test_a_rewind_reaches_the_index_and_the_epochs_of_every_shard(shards: list[Shard]) -> None:
    first, second = shards
    for epoch in (5, 6):
        await second[0].add(batch(b"aaaa", epoch, PROMPT))
    assert await first[0].rewind("run", 5) == 1
    await until(lambda: second[0].epochs.newest("run") == 5)
    await until(lambda: not indexed(second))
    second[0].missing.want(Problem("run", PROMPT))
    await until(lambda: indexed(second) == [5])


async def test_what_redis_has_lost_leaves_the_index(shards: list[Shard], redis_server: RedisProcess) -> None:
    first, second = shards
    await second[0].add(batch(b"aaaa", 5, PROMPT))
    redis_server.client.flushall()
    await until(lambda: not indexed(second))
    await first[0].add(batch(b"bbbb", 7, PROMPT))
    await until(lambda: second[0].epochs.newest("run") == 7)
    second[0].missing.want(Problem("run", PROMPT))
    await until(lambda: indexed(second) == [7])
