"""The reported size and limits of a store."""

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from histospec.server.stores.interface import Problem, Record, ResponseBatch, StoreSize
from histospec.server.stores.redis.servers import MEMORY_SECONDS, Memory
from histospec.server.stores.redis.store import RedisStore
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.server.stores.conftest import OpenRedis, OpenSQLite
from tests.support.disks import small_disk
from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.waiting import eventually

MIB = 1 << 20
BATCH = ResponseBatch(Problem("run", b"prompt.."), [Record(bytes([number]) * MIB, 1) for number in range(8)])


def test_sqlite_holds_what_is_stored_and_not_what_left_it(open_store: OpenSQLite, tmp_path: Path) -> None:
    """New responses reuse pages that a drop has freed: a file that was once large is not full."""
    store = open_store(disk=64 * MIB)
    empty = store.size.held
    assert empty is not None
    assert empty < MIB
    store.append(BATCH).result()
    filled = store.size
    assert filled.held is not None
    assert filled.held >= 8 * MIB
    assert filled.limit == 64 * MIB
    store.drop("run").result()
    store.close()
    assert (tmp_path / "histospec.sqlite").stat().st_size > 8 * MIB
    again = open_store(disk=64 * MIB).size.held
    assert again is not None
    assert again < MIB


def test_sqlite_says_what_its_volume_has_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as directory:
        store = SQLiteStore(directory, 8)
        before = store.size
        assert (before.limit, before.disk_size) == (None, 2 * MIB)
        (directory / "another file").write_bytes(bytes(MIB // 2))
        after = store.size
        assert before.disk_free is not None
        assert after.disk_free is not None
        assert before.disk_free - after.disk_free == MIB // 2
        store.close()


def test_a_store_whose_files_are_gone_does_not_say_how_large_they_are(open_store: OpenSQLite, tmp_path: Path) -> None:
    store = open_store(disk=64 * MIB)
    shutil.rmtree(tmp_path)
    assert store.size == StoreSize(None, 64 * MIB, None, None)
    tmp_path.mkdir()


def known(store: RedisStore) -> StoreSize:
    """Returns the size once Redis has answered."""
    eventually(lambda: store.size.held, "Redis does not say how much it holds")
    return store.size


def test_redis_says_how_full_it_is(server: RedisProcess, open_redis: OpenRedis) -> None:
    first = known(open_redis(server.url))
    assert first.held is not None
    assert (first.limit, first.disk_free, first.disk_size) == (None, None, None)  # no maxmemory, and no local disk
    server.client.config_set("maxmemory", 100 * MIB)
    store = open_redis(server.url)
    store.append(BATCH).result()
    second = known(store)
    assert second.held is not None
    assert second.held >= first.held + 8 * MIB
    assert second.limit == 100 * MIB


def test_a_cluster_adds_up(tmp_path: Path, open_redis: OpenRedis) -> None:
    require_redis()
    cluster = RedisCluster(tmp_path)
    try:
        for node in cluster.nodes:
            node.client.config_set("maxmemory", 50 * MIB)
        size = known(open_redis(cluster.url))
        used = [node.client.info("memory")["used_memory"] for node in cluster.nodes]
        assert size.limit == 150 * MIB
        assert size.held is not None
        assert max(used) * 2 < size.held
    finally:
        cluster.kill()


def test_a_user_who_may_not_ask_redis_gets_no_number(server: RedisProcess, open_redis: OpenRedis) -> None:
    server.client.acl_setuser(
        "shard", enabled=True, passwords=["+pw"], categories=["+@all"], commands=["-info"], keys=["*"]
    )
    store = open_redis(f"redis://shard:pw@{server.where}")
    assert store.size == StoreSize()
    eventually(lambda: not store._memory._asking, "the question does not end")
    assert store.size == StoreSize()


class Redis:
    """Answers when released."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = threading.Semaphore(0)
        self.answer: Mapping[str, Any] | Exception = {"used_memory": 5, "maxmemory": 0}

    def __call__(self) -> list[Mapping[str, Any]]:
        self.asked += 1
        assert self.go.acquire(timeout=60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer, {"used_memory": 2, "maxmemory": 7}]


def test_nobody_waits_for_redis_and_it_is_asked_seldom() -> None:
    """
    1. While Redis does not answer, calls return at once and send no second request.
    2. Its answer is shown; the next request follows ten seconds later, not before.
    3. A failure removes the number. So does an answer without it.
    """
    seconds, server = [0.0], Redis()
    memory = Memory(server, lambda: seconds[0])

    def answered() -> None:
        server.go.release()
        eventually(lambda: not memory._asking, "the question does not end")

    assert [memory.look() for _ in range(5)] == [(None, None)] * 5
    assert server.asked == 1
    answered()
    assert memory.look() == (7, None)  # one of the two has no limit
    seconds[0] = MEMORY_SECONDS - 1
    memory.look()
    assert server.asked == 1
    failures: list[Mapping[str, Any] | Exception] = [redis.ConnectionError("away"), {"maxmemory": 1}]
    for number, failure in enumerate(failures):
        seconds[0] += MEMORY_SECONDS
        server.answer = failure
        memory.look()
        assert server.asked == 2 + number
        answered()
        assert memory.look() == (None, None)
