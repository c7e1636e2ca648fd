"""Stores in SQLite and in Redis, opened as often as a test wants."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.servers import Servers
from histospec.server.stores.redis.store import RedisStore
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.redis_processes import RedisProcess, require_redis

OpenSQLite = Callable[..., SQLiteStore]
OpenRedis = Callable[..., RedisStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenSQLite]:
    stores = []

    def open_(history_epochs: int = 8, **options: Any) -> SQLiteStore:
        stores.append(SQLiteStore(tmp_path, history_epochs, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def open_redis() -> Iterator[OpenRedis]:
    """open_redis(url or a function that returns it) opens a shard's store; the shards are numbered."""
    stores: list[RedisStore] = []

    def open_(url: str | Callable[[], str], servers: Callable[..., Servers] = Servers, **options: Any) -> RedisStore:
        where = url if callable(url) else lambda: url
        shard = options.pop("shard", f"shard-{len(stores)}")
        stores.append(RedisStore(servers(lambda: Location.parse(where())), 8, shard, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A Redis server of the test's own, for failures."""
    require_redis()
    server = RedisProcess(tmp_path / "redis")
    yield server
    server.kill()
