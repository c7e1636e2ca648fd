"""Fixture of a server that misbehaves on purpose."""

from collections.abc import Iterator

import pytest

from tests.support.odd_server import OddServer


@pytest.fixture
def odd_server() -> Iterator[OddServer]:
    server = OddServer()
    yield server
    server.stop()
