"""Fixtures for tests of the deployment."""

from collections.abc import Iterator

import pytest

from tests.support.control_plane import Cluster, running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster
