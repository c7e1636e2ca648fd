"""Three shards and six Redis servers on hosts of their own, and what a network and a fleet do to them under load.

`make test` takes the faults of SHORT, each once. `make chaos` takes all of them in HISTOSPEC_CHAOS_ROUNDS rounds, in an
order and at hosts that HISTOSPEC_CHAOS_SEED decides; the seed is printed.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import redis
from network import Host, Network
from redis_processes import RedisCluster, RedisProcess, require_redis
from rollouts import NAMES, Load, connections
from waiting import eventually

ROUNDS = int(os.environ.get("HISTOSPEC_CHAOS_ROUNDS", "0"))
SEED = int(os.environ.get("HISTOSPEC_CHAOS_SEED") or (time.time_ns() % 10**6 if ROUNDS else 0))
CUT = 4.0
"""Seconds of a partition; the shards try a write again for 10."""
LONG_CUT = 25.0


@dataclass
class Service:
    """Three shards, a Redis Cluster of three masters with a replica each, and the hosts that they are on."""

    shards: list
    shard_hosts: list[Host]
    redis: RedisCluster
    redis_hosts: list[Host]

    def heal(self) -> None:
        """The network is whole again, and everything runs."""
        for host in (*self.shard_hosts, *self.redis_hosts):
            host.heal()
        for node in self.redis.nodes:
            if node.process.poll() is not None:
                node.start()
        eventually(lambda: all(map(_settled, self.redis.nodes)), "the Redis Cluster does not recover", redis.RedisError)
        for shard in self.shards:
            shard.restart_if_ended()


def _settled(node: RedisProcess) -> bool:
    replication = node.client.info("replication")
    if replication["role"] == "master":
        return replication["connected_slaves"] == 1 and node.client.cluster("info")["cluster_state"] == "ok"
    return replication["master_link_status"] == "up"


@pytest.fixture(scope="module")
def network():
    require_redis()
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module")
def redis_hosts(network, tmp_path_factory):
    hosts = [network.host() for _ in range(6)]
    cluster = RedisCluster(tmp_path_factory.mktemp("redis"), replicas=1, hosts=hosts)
    yield cluster, hosts
    cluster.kill()
