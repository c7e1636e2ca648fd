"""Results of a client in a form that tests can compare."""

from collections.abc import Iterable

import numpy as np

from histospec.client import DraftClient, Response, Stats


def texts(responses: Iterable[Response] | None) -> list[list[int]]:
    """The tokens of each, in their order. None, as from a shard that is away, fails the test."""
    assert responses is not None
    return [np.asarray(response.tokens).tolist() for response in responses]


def flushed(client: DraftClient, timeout: float | None = None) -> Stats:
    """What the client has counted once it has sent what waits, or after so many seconds, as `flush` has it."""
    client.flush(timeout)
    return client.stats()
