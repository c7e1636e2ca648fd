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


def test_updates_that_wait_stay_with_the_updater(server: Server, wire: Wire) -> None:
    response = text(400_000)  # 1.2 MB
    peak = Peak(server.pid)
    with stopped(server):
        calls = Updater(wire.channel).start([([number], [response]) for number in range(PROMPTS)])
        wire.history([1])  # others do not wait for them
        time.sleep(SOON)
        grown = peak.grown()
        assert not any(call.done() for call in calls)
    assert grown < 60 << 20
    assert failures(calls) == []
    assert wire.history([PROMPTS - 1], "specrl") == [response]
    assert server.metrics()["histospec_ingested_responses_total"] == PROMPTS


def test_a_server_ends_while_updates_arrive(start_server: Starter, connect: Connector) -> None:
    server = start_server("--drain-seconds", "1")
    wire = connect(server.endpoint)
    over = Latch()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    update = wire.channel.stream_unary("/specrl.RolloutCacheService/UpdateCache", bytes, bytes)
    calls: list[Any] = [update.future(nothing()) for _ in range(PROMPTS)]
    wire.ingest([1], [[2]])  # they have arrived before it
    server.drain()
    over.set()
    assert len(failures(calls)) == PROMPTS
