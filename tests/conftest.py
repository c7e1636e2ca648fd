"""Fixtures for all tests: `server` and `start_server` give a process, `wire` and `connect` raw connections to it."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.disks import small_disk
from tests.support.object_store import ObjectStore
from tests.support.redis_processes import RedisCluster, RedisProcess, require_redis
from tests.support.servers import Server, Starter
from tests.support.waiting import SLOWNESS
from tests.support.wires import Connector, Wire

# On a busy machine, any example may take longer than the 200 ms that Hypothesis gives it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HISTOSPEC_")}


GIVEN = _variables()


def pytest_collection_finish() -> None:
    """Refuses to run if importing the tests changed HistoSpec's settings, for every test of a worker."""
    if changed := dict(_variables().items() ^ GIVEN.items()):
        raise pytest.UsageError(f"a module that the tests import sets {', '.join(sorted(changed))}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives tests more time on a slow machine."""
    limit = float(config.getoption("timeout") or config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout((mark.args[0] if mark else limit) * SLOWNESS), append=False)


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
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 2 MiB."""
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisProcess]]:
    """start_redis(*options, password=None): a Redis server that the test may stop, and that ends with it."""
    require_redis()
    with ExitStack() as stack:

        def start(*options: str, folder: Path = tmp_path, password: str | None = None) -> RedisProcess:
            redis = RedisProcess(folder / "redis", *options, password=password)
            stack.callback(redis.kill)
            return redis

        yield start


@pytest.fixture
def own_redis(start_redis: Callable[..., RedisProcess]) -> RedisProcess:
    """A Redis server that the test may stop."""
    return start_redis()


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    pytest.importorskip("obstore", reason="needs histospec[backup]")
    store = ObjectStore(tmp_path_factory.mktemp("seaweedfs"))
    yield store
    store.kill()


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
