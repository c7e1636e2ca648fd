"""The Redis store while Redis loses data: what it acknowledges is found, is in a snapshot, and can be dropped."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from histospec.server.errors import StoreError
from histospec.server.stores.interface import Problem, Store
from histospec.server.stores.redis import keys
from histospec.server.stores.redis.servers import Command, Servers
from tests.server.stores.conftest import OpenRedis
from tests.support.batches import batch, put
from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.waiting import Latch, eventually

PROMPTS = [bytes([number] * 4) for number in range(6)]
NAMESPACES = ("run", "other")
STEPS = 40
LISTS = keys.PREFIX + b"problems:*"


def snapshot(store: Store, namespace: str) -> set[tuple[bytes, bytes]]:
    """Returns the (prompt, tokens) that a snapshot has of a namespace."""
    store.complete()
    if namespace not in store.newest_epochs():
        return set()
    return {(problem.prompt, r.tokens) for problem, found in store.problems(namespace) for r in found}


def found(store: Store, namespace: str) -> set[tuple[bytes, bytes]]:
    """Returns the (prompt, tokens) that `History` finds in a namespace."""
    return {(prompt, r.tokens) for prompt in PROMPTS for r in store.history(Problem(namespace, prompt))}


class Service:
    """A Redis, two shards that share it, and what they have acknowledged since Redis last lost data."""

    def __init__(self, folder: Path, open_redis: OpenRedis, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.servers = [self._redis()]
        self.shards = [open_redis(lambda: self.redis.url) for _ in range(2)]
        self.acknowledged: dict[str, set[tuple[bytes, bytes]]] = {namespace: set() for namespace in NAMESPACES}
        self.written = 0

    def _redis(self, *options: str) -> RedisProcess:
        number = len(list(self.folder.iterdir()))
        return RedisProcess(
            self.folder / str(number), "--appendonly", "no", "--repl-diskless-sync-delay", "0", *options
        )

    @property
    def redis(self) -> RedisProcess:
        return self.servers[-1]

    def lost(self) -> None:
        for known in self.acknowledged.values():
            known.clear()

    def write(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            namespace, prompt = self.random.choice(NAMESPACES), self.random.choice(PROMPTS)
            self.written += 1
            tokens = self.written.to_bytes(4, "little")
            try:
                put(
                    self.random.choice(self.shards), tokens, epoch=self.written // 8, prompt=prompt, namespace=namespace
                )
            except StoreError as error:
                assert "is no hash" in str(error)  # noqa: PT017 - nothing else may be refused
            else:
                kept = self.acknowledged[namespace]
                kept.add((prompt, tokens))
                if len(kept) > 60:  # the window is 8 epochs of at most 8 responses
                    kept.difference_update(sorted(kept, key=lambda one: int.from_bytes(one[1], "little"))[:-40])

    def flush(self) -> None:
        self.redis.client.flushall()
        self.lost()

    def restart(self) -> None:
        self.redis.kill()
        self.redis.start()
        self.lost()

    def evict(self) -> None:
        """Only the lists: the responses are there."""
        lists = [*self.redis.client.keys(LISTS), keys.NAMESPACES, keys.GENERATIONS]
        self.redis.client.delete(*self.random.sample(lists, self.random.randrange(1, len(lists) + 1)))

    def fail_over(self) -> None:
        """A replica takes over that lacks the last writes."""
        replica = self._redis("--replicaof", "127.0.0.1", str(self.redis.port))
        state: Callable[[], Any] = lambda: replica.client.info("replication")["master_link_status"]  # noqa: E731
        eventually(lambda: state() == "up", "the replica does not follow", no=redis.RedisError)
        replica.client.replicaof("NO", "ONE")
        replica.options = self.redis.options  # for a restart
        self.write()
        self.redis.kill()
        self.servers.append(replica)
        self.lost()

    def drop(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        self.random.choice(self.shards).drop(namespace).result()
        self.acknowledged[namespace].clear()
        for shard in self.shards:
            assert found(shard, namespace) == set()
            assert snapshot(shard, namespace) == set()

    def spoil(self) -> None:
        """Another program writes to a key of the store."""
        problem = keys.problem_key(keys.digest_of(Problem(self.random.choice(NAMESPACES), self.random.choice(PROMPTS))))
        bucket = keys.bucket_key(self.random.choice(NAMESPACES).encode(), self.random.randrange(keys.BUCKETS))
        lists = self.redis.client.keys(LISTS)
        key = self.random.choice([problem, keys.NAMESPACES, keys.GENERATIONS, bucket, *lists])
        self.redis.client.set(key, "not ours")
        if key == problem:
            self.lost()

    def watch(self) -> None:
        """The shards look for what others have done."""
        for shard in self.shards:
            shard.complete()
            shard.replaced()

    def check(self) -> None:
        for namespace, known in self.acknowledged.items():
            reader = self.random.choice(self.shards)
            there = found(reader, namespace)
            assert known <= there
            assert snapshot(self.random.choice(self.shards), namespace) == there


@pytest.mark.parametrize("seed", range(4))
def test_what_is_acknowledged_is_found_in_the_snapshot_and_dropped_whatever_redis_loses(
    tmp_path: Path, open_redis: OpenRedis, seed: int
) -> None:
    require_redis()
    service = Service(tmp_path, open_redis, seed)
    faults = [
        service.flush, service.restart, service.evict, service.fail_over, service.drop, service.spoil, service.watch,
    ]  # fmt: skip
    try:
        for _ in range(STEPS):
            service.write()
            service.random.choice(faults)()
            service.write()
            service.check()
        for namespace in NAMESPACES:
            service.shards[0].drop(namespace).result()
        assert service.redis.client.keys(keys.PREFIX + b"problem*") == []
        assert service.shards[1].newest_epochs() == {}
    finally:
        for server in service.servers:
            server.kill()


def test_lists_that_a_cluster_has_lost_are_made_again(redis_cluster: RedisCluster, open_redis: OpenRedis) -> None:
    store = open_redis(redis_cluster.url)
    for prompt in PROMPTS:
        put(store, b"aaaa", epoch=3, prompt=prompt)
    for node in redis_cluster.masters():
        for key in [*node.client.keys(LISTS), *node.client.keys(keys.NAMESPACES)]:
            node.client.delete(key)
    fresh = open_redis(redis_cluster.url)
    with capture_logs() as logs:
        assert snapshot(fresh, "run") == {(prompt, b"aaaa") for prompt in PROMPTS}
    assert [line["problems"] for line in logs] == [len(PROMPTS)]
    assert fresh.newest_epochs() == {"run": 3}
    assert fresh.drop("run").result() == len(PROMPTS)
    assert found(store, "run") == set()


def test_a_bad_key_fails_only_its_own_response(redis_server: RedisProcess, open_redis: OpenRedis) -> None:
    """The responses wait for one write, and then go to Redis as one group."""
    gate, sent = Latch(), []

    class Gated(Servers):
        def each(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
            sent.append(commands)
            gate.wait()
            return super().each(commands, replicas)

    store = open_redis(redis_server.url, Gated)
    bad, unlisted = Problem("run", PROMPTS[0]), Problem("run", PROMPTS[1])
    redis_server.client.set(keys.problem_key(keys.digest_of(bad)), "not ours")
    redis_server.client.set(keys.problems_key(b"run", keys.digest_of(unlisted)), "not ours")
    first = store.append(batch(b"1st.", prompt=PROMPTS[2]))
    eventually(lambda: sent, "nothing is written")
    waiting: list[Future[int]] = [store.append(batch(b"next", prompt=prompt)) for prompt in PROMPTS]
    gate.set()
    first.result()
    with pytest.raises(StoreError, match="is no hash, so another program wrote to it; delete it"):
        waiting[0].result()
    for future in waiting[1:]:
        future.result()
    assert len([one for one in sent if one[0][0] == "EVAL" and len(one) == len(PROMPTS)]) == 1
    assert (
        found(store, "run") == snapshot(store, "run") == {*((p, b"next") for p in PROMPTS[1:]), (PROMPTS[2], b"1st.")}
    )
    assert store.damaged_responses == 1


def test_a_response_that_cannot_be_listed_is_not_kept(redis_server: RedisProcess, open_redis: OpenRedis) -> None:
    class Unlisting(Servers):
        def each(self, commands: Sequence[Command], replicas: bool = False) -> list[Any]:
            lists = [command[0] == "SADD" for command in commands]
            answers = super().each([c for c, listing in zip(commands, lists, strict=True) if not listing], replicas)
            return [redis.ResponseError("no") if listing else answers.pop(0) for listing in lists]

    with pytest.raises(StoreError, match="the request is refused"):
        put(open_redis(redis_server.url, Unlisting), b"aaaa", prompt=PROMPTS[0])
    assert found(open_redis(redis_server.url), "run") == set()


def test_a_shard_hears_of_drops_rewinds_and_losses(redis_server: RedisProcess, open_redis: OpenRedis) -> None:
    mine, others = open_redis(redis_server.url), open_redis(redis_server.url)
    put(mine, b"aaaa", epoch=1)
    put(others, b"bbbb", epoch=2)
    assert (mine.replaced(), others.replaced()) == ({}, {})
    others.rewind("run", 1).result()
    assert (mine.replaced(), others.replaced()) == ({"run": False}, {})
    others.drop("run").result()
    put(others, b"cccc")
    assert (mine.replaced(), others.replaced()) == ({"run": True}, {})
    mine.drop("absent").result()
    redis_server.client.flushall()
    put(others, b"dddd")
    assert others.newest_epochs() == {"run": 0}  # listed again, although this shard has listed it before
    assert (mine.replaced(), others.replaced()) == ({"run": False}, {"run": False})
    assert (mine.replaced(), others.replaced()) == ({}, {})


def test_an_estimator_is_not_saved_after_a_drop_by_another_shard(
    redis_server: RedisProcess, open_redis: OpenRedis
) -> None:
    mine, others = open_redis(redis_server.url), open_redis(redis_server.url)
    put(mine, b"aaaa")
    others.drop("run").result()
    mine.save_estimator("run", b"learned before").result()
    assert (mine.estimator("run"), mine.newest_epochs()) == (None, {})
    mine.replaced()
    mine.save_estimator("run", b"learned after").result()
    assert others.estimator("run") == b"learned after"


def test_a_redis_that_evicts_is_a_hazard(redis_server: RedisProcess, open_redis: OpenRedis) -> None:
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        store = open_redis(redis_server.url)
        with capture_logs() as logs:
            eventually(lambda: store.size and store.hazard, "the policy is not seen")
    finally:
        redis_server.client.config_set("maxmemory-policy", "noeviction")
    assert store.hazard == "maxmemory-policy of Redis is allkeys-lru; set noeviction"
    assert [line["maxmemory_policy"] for line in logs if "deletes" in line["event"]] == ["allkeys-lru"]
