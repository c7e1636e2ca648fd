"""A server that misbehaves on purpose, and a way to wait without guessing times."""

from collections.abc import Callable, Iterator

import pytest
import waiting
from odd_server import OddServer


@pytest.fixture
def odd_server() -> Iterator[OddServer]:
    server = OddServer()
    yield server
    server.stop()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(condition)` returns when it is true; how long that takes is not what is tested."""
    return waiting.eventually
