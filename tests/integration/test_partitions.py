"""Three shards and six Redis servers on separate hosts, under load and network faults.

`make test` runs the faults in SHORT. `make chaos` runs all of them HISTOSPEC_CHAOS_ROUNDS times, in an order and on
hosts that HISTOSPEC_CHAOS_SEED determines.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from redis import RedisError

from tests.support.network import Host, Network
from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.rollouts import NAMES, Load, connections
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

ROUNDS = int(os.environ.get("HISTOSPEC_CHAOS_ROUNDS", "0"))
SEED = int(os.environ.get("HISTOSPEC_CHAOS_SEED") or (time.time_ns() % 10**6 if ROUNDS else 0))
CUT = 4.0
"""Seconds of a partition that the shards sit out: they try a write again for 10 s before they refuse it."""
LONG_CUT = 20.0


def host_of(process: Server | RedisProcess) -> Host:
    assert process.host is not None
    return process.host


class Service:
    """Three shards on a Redis Cluster of three masters with a replica each; every process on its own host."""

    def __init__(self, network: Network, redis: RedisCluster, start: Starter) -> None:
        self.redis = redis
        self.redis_hosts = [host_of(node) for node in self.redis.nodes]
        hosts = [network.host() for _ in NAMES]
        flags = ("--store", f"{self.redis.url}?replicas=1", "--drain-seconds", "2")
        with ThreadPoolExecutor(len(NAMES)) as pool:
            starts = [pool.submit(start, *flags, "--shard-name", n, host=h) for n, h in zip(NAMES, hosts, strict=True)]
        self.shards = [started.result() for started in starts]

    def heal(self) -> None:
        """Returns when everything runs and reaches everything else."""
        for host in (*self.redis_hosts, *(host_of(shard) for shard in self.shards)):
            host.heal()
        processes: list[Server | RedisProcess] = [*self.redis.nodes, *self.shards]
        for process in processes:
            if not process.running:
                process.start()
        self.redis.recovers()

    def fails_over(self, master: RedisProcess) -> None:
        """Waits until another server has replaced it as master."""
        others = [node for node in self.redis.nodes if node is not master]
        eventually(
            lambda: sum(node.client.info("replication")["role"] == "master" for node in others) == 3,
            "no replica takes over",
            no=RedisError,
        )


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    require_redis()
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module")
def redis(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    hosts = [network.host() for _ in range(6)]
    redis = RedisCluster(tmp_path_factory.mktemp("redis"), replicas=1, hosts=hosts)
    yield redis
    redis.kill()


@pytest.fixture(scope="module")
def shared_service(network: Network, redis: RedisCluster, start_shared: Starter) -> Service:
    return Service(network, redis, start_shared)


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    yield shared_service
    shared_service.heal()


# The faults. Each one is healed when it returns, and returns the shards that it affected.

Fault = Callable[[Service, Load, random.Random], list[int]]


@contextmanager
def harmed_shard(service: Service, chance: random.Random) -> Iterator[tuple[int, Host]]:
    """Any shard and its host, which is healed in the end."""
    shard = chance.randrange(3)
    yield shard, host_of(service.shards[shard])
    host_of(service.shards[shard]).heal()


def a_shard_is_cut_off(service: Service, load: Load, chance: random.Random) -> list[int]:
    with harmed_shard(service, chance) as (shard, host):
        host.cut()
        time.sleep(CUT)
        load.goes_on()
        assert load.pending()
    return [shard]


def a_shard_loses_the_store(service: Service, load: Load, chance: random.Random, seconds: float = CUT) -> list[int]:
    """The shard still drafts; finished responses wait for the store and are written once it is reachable again."""
    with harmed_shard(service, chance) as (shard, host):
        host.cut(*service.redis_hosts)
        load.drafts_of(shard)
        time.sleep(seconds)
        load.drafts_of(shard)
        if seconds == LONG_CUT:
            store_errors = "histospec_store_errors_total"
            eventually(lambda: service.shards[shard].metrics()[store_errors] > 0, "nothing is refused")
        assert load.pending()
    return [shard]


def a_shard_loses_the_store_for_long(service: Service, load: Load, chance: random.Random) -> list[int]:
    """The same, for so long that the shard refuses responses; the workers keep them and retry."""
    return a_shard_loses_the_store(service, load, chance, LONG_CUT)


def a_shard_loses_packets(service: Service, load: Load, chance: random.Random) -> list[int]:
    with harmed_shard(service, chance) as (shard, host):
        host.lose(0.3)
        time.sleep(CUT)
        load.goes_on()
    return [shard]


def a_shard_and_a_master_do_not_see_each_other(service: Service, load: Load, chance: random.Random) -> list[int]:
    """The Cluster is healthy and has no reason for a failover."""
    with harmed_shard(service, chance) as (shard, host):
        host.cut(host_of(chance.choice(service.redis.masters())))
        time.sleep(CUT)
        load.goes_on()
    return [shard]


def a_redis_master_is_cut_off(service: Service, load: Load, chance: random.Random) -> list[int]:
    master = chance.choice(service.redis.masters())
    host_of(master).cut()
    service.fails_over(master)
    load.goes_on()
    host_of(master).heal()
    return [0, 1, 2]


def every_redis_master_is_killed(service: Service, load: Load, chance: random.Random) -> list[int]:
    for master in service.redis.masters():
        master.kill()
        service.fails_over(master)
        load.goes_on(2)
        master.start()
        service.redis.recovers()
    return [0, 1, 2]


def every_shard_is_killed(service: Service, load: Load, chance: random.Random) -> list[int]:
    for number, shard in enumerate(service.shards):
        shard.kill()
        load.goes_on(2)
        shard.start()
        load.drafts_of(number)
    return [0, 1, 2]


def every_shard_is_restarted(service: Service, load: Load, chance: random.Random) -> list[int]:
    """A rolling update."""
    for shard in service.shards:
        shard.drain()
        shard.start()
        load.goes_on(1)
    return [0, 1, 2]


SHORT: list[Fault] = [a_shard_is_cut_off, a_shard_loses_the_store, a_shard_loses_packets, a_redis_master_is_cut_off]
LONG: list[Fault] = [
    *SHORT,
    a_shard_loses_the_store_for_long,
    a_shard_and_a_master_do_not_see_each_other,
    every_redis_master_is_killed,
    every_shard_is_killed,
    every_shard_is_restarted,
]


def plan() -> list[tuple[Fault, int]]:
    chance = random.Random(SEED)
    chosen = [fault for _ in range(ROUNDS) for fault in chance.sample(LONG, len(LONG))] or SHORT
    return [(fault, SEED + i) for i, fault in enumerate(chosen)]


@pytest.mark.parametrize(("fault", "seed"), plan())
def test_a_fault_costs_nothing_but_drafts(service: Service, fault: Fault, seed: int) -> None:
    """
    1. Four workers roll out 24 prompts of three shards; a fault comes and goes.
    2. The workers continue all the while, and no step takes longer than its deadline allows.
    3. Soon the shards draft again, and the history has everything that the workers finished.
    """
    print(f"HISTOSPEC_CHAOS_SEED={SEED}")  # noqa: T201
    with connections([shard.endpoint for shard in service.shards]) as connect:
        connect(5.0).drop_namespace()
        load = Load(connect)
        shards = fault(service, load, random.Random(seed))
        load.goes_on()
        for shard in shards:
            load.drafts_of(shard)
        load.finish()
