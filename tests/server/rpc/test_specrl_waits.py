"""SpecRL's updater never retries: its updates wait where an ingest is refused, and take little memory meanwhile."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from histospec.server.rpc.specrl import AT_ONCE
from histospec.server.stores.sqlite.file import FILE_NAME
from tests.support.servers import Peak, Server, Starter
from tests.support.specrl_updater import Updater, failures
from tests.support.waiting import Latch, eventually
from tests.support.wires import Connector, Wire

PROMPTS = 60
SOON = 1.0  # seconds in which calls arrive; a server that reads all at once fails these tests if they do


def text(tokens: int) -> list[int]:
    found: list[int] = np.random.default_rng(tokens).integers(1 << 14, 150_000, tokens).tolist()
    return found


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Lets the server's store write nothing for a while; for longer than 10 s, its writes fail."""
    with closing(sqlite3.connect(server.data_dir / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


class Silent:
    """Updates that arrive without their message, as many as the server reads at the same time."""

    def __init__(self, wire: Wire) -> None:
        self._latch = Latch()
        call = wire.channel.stream_unary("/specrl.RolloutCacheService/UpdateCache", bytes, bytes)
        self._calls: list[Any] = [call.future(self._nothing()) for _ in range(AT_ONCE)]
        wire.ingest([1], [[2]])  # on the same connection: they have arrived before it

    def _nothing(self) -> Iterator[bytes]:
        self._latch.wait()
        yield from ()

    def end(self) -> None:
        for call in self._calls:
            call.cancel()
        self._latch.set()


def test_a_full_queue_of_the_store_loses_no_update(start_server: Starter, connect: Connector) -> None:
    """Several updaters send more than may wait for the store, also with the first updates; they send nothing again."""
    server = start_server("--max-backlog", "1MiB")
    wires = [connect(server.endpoint) for _ in range(3)]
    response = text(60_000)
    assert AT_ONCE * 4 * len(response) > 1 << 20
    with stopped(server):
        calls = []
        for number in range(PROMPTS):
            calls += Updater(wires[number % 3].channel).start([([number], [response])])
        eventually(lambda: server.metrics()["histospec_store_waiting_bytes"] > 1 << 18)
        time.sleep(SOON)
        assert not any(call.done() for call in calls)
        assert server.metrics()["histospec_store_waiting_bytes"] <= 1 << 20
    assert failures(calls) == []
    for number in range(PROMPTS):
        assert wires[0].history([number], "specrl") == [response]
    metrics = server.metrics()
    assert metrics["histospec_ingested_responses_total"] == PROMPTS
    assert metrics["histospec_store_errors_total"] == 0


def test_updates_that_wait_stay_with_the_updater(server: Server, connect: Connector, wire: Wire) -> None:
    silent = Silent(connect(server.endpoint))
    response = text(400_000)  # 1.2 MB
    peak = Peak(server.pid)
    calls = Updater(wire.channel).start([([number], [response]) for number in range(PROMPTS)])
    wire.ingest([1], [[2]])  # an Ingest does not wait for them
    time.sleep(SOON)
    grown = peak.grown()
    assert not any(call.done() for call in calls)
    assert grown < 30 << 20
    silent.end()
    assert failures(calls) == []
    assert wire.history([PROMPTS - 1], "specrl") == [response]
    assert server.metrics()["histospec_ingested_responses_total"] == PROMPTS + 2


def test_a_server_ends_while_updates_wait(start_server: Starter, connect: Connector) -> None:
    server = start_server("--drain-seconds", "1")
    silent = Silent(connect(server.endpoint))
    wire = connect(server.endpoint)
    calls = Updater(wire.channel).start([([number], [[1, 2]]) for number in range(PROMPTS)])
    wire.ingest([1], [[2]])  # they have arrived before it
    server.drain()
    silent.end()
    assert len(failures(calls)) == PROMPTS
