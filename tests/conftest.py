"""Fixtures for all tests: `server` and `start_server` give a process, `wire` and `connect` raw connections to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.servers import Server, Starter
from tests.support.wires import Connector, Wire


@pytest.fixture(scope="session")
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    require_redis()
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def _redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    require_redis()
    cluster = RedisCluster(tmp_path_factory.mktemp("redis-cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture
def redis_server(_redis_server: RedisProcess) -> RedisProcess:
    """A Redis server without data, for tests that leave it running."""
    _redis_server.client.flushall()
    return _redis_server


@pytest.fixture
def redis_cluster(_redis_cluster: RedisCluster) -> RedisCluster:
    """A Redis Cluster of three masters without data, for tests that leave it running."""
    for node in _redis_cluster.nodes:
        node.client.flushall()
    return _redis_cluster


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Starter]:
    """A factory of servers that end with the test."""
    start = Starter(tmp_path)
    yield start
    start.stop()


@pytest.fixture
def server(start_server: Starter) -> Server:
    """One running server with default options, of this test alone."""
    return start_server()


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """A factory of servers that end with the module."""
    start = Starter(tmp_path_factory.mktemp("shared"))
    yield start
    start.stop()


@pytest.fixture(scope="module")
def shared_server(start_shared: Starter) -> Server:
    """One running server with default options for all tests of a module."""
    return start_shared()


@pytest.fixture
def connect() -> Iterator[Connector]:
    """A factory of raw connections that end with the test."""
    connect = Connector()
    yield connect
    connect.close()


@pytest.fixture(scope="module")
def connect_shared() -> Iterator[Connector]:
    """A factory of raw connections that end with the module."""
    connect = Connector()
    yield connect
    connect.close()


@pytest.fixture
def wire(server: Server, connect: Connector) -> Wire:
    """A raw connection to `server`."""
    return connect(server.endpoint)
