"""Hostile clients do not slow others and leave nothing behind. `make chaos` runs far more of them."""

import asyncio
import os
from collections import Counter

import pytest

from histospec.client import DraftClient, Response
from tests.support.hostile import messages, streams
from tests.support.rollouts import TEXT, Drafted
from tests.support.servers import Starter
from tests.support.waiting import eventually

MESSAGES = int(os.environ.get("HISTOSPEC_CHAOS_MESSAGES", "4000"))
STREAMS = int(os.environ.get("HISTOSPEC_CHAOS_STREAMS", "300"))
ROOM = 64 << 20  # memory that allocators keep; after attack upon attack it goes up and down by half of this
HISTORIES = 16 << 20  # what some messages add to the index
KEPT = 200  # responses of the worker; more of them would be growth, too


def test_harm_is_refused_and_leaves_nothing(start_server: Starter) -> None:
    """
    1. A first part of the attack, after which the process has the memory that it needs for refusals.
    2. The rest: no crash and no growth; a worker gets drafts in every step, and all its responses are kept.
    """
    server = start_server("--history-epochs", "1", "--memory", "64MiB", "--max-namespaces", "64")
    with DraftClient(server.endpoint, namespace="good", deadline=10.0) as client:
        client.ingest([1, 2, 3], [Response(TEXT)], epoch=0)
        bystander = Drafted(client, commits=KEPT, epochs=False)
        try:
            attack(server.endpoint, MESSAGES // 4, STREAMS // 4, seed=1)
            before = server.metrics()["process_resident_memory_bytes"]
            outcomes, kinds = attack(server.endpoint, MESSAGES, STREAMS, seed=2)
        finally:
            bystander.stop()
        stats = client.stats()
        assert (stats.failed, stats.late, stats.reopened, stats.pending_commits, stats.dropped_commits) == (0,) * 5
        assert stats.commits == min(bystander.rollouts, KEPT) > 0
        assert bystander.undrafted == 0
        assert len(client.history([1, 2, 3])) == 1 + stats.commits
    assert set(outcomes) <= {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "ended"}, outcomes
    assert outcomes["INVALID_ARGUMENT"] > MESSAGES / 2
    assert min(kinds.values()) > STREAMS / 30, kinds
    assert not [entry for entry in server.log if entry.get("event") == "rpc failed"]
    eventually(lambda: server.metrics()["histospec_streams"] == 0, "a stream does not end")
    metrics = server.metrics()
    assert metrics["histospec_index_bytes"] < HISTORIES
    grown = metrics["process_resident_memory_bytes"] - before
    assert grown < ROOM, f"{grown / 2**20:.0f} MiB of memory are not given back"


def test_one_stream_cannot_take_the_room_of_all(start_server: Starter, caplog: pytest.LogCaptureFixture) -> None:
    """
    1. A client opens far more sessions than the memory budget allows: those beyond half of it are refused.
    2. Another client keeps its history and may open sessions; so may the first once it has closed some.
    """
    server = start_server("--memory", "16MiB")
    everybody = [[7, p] for p in range(6000)]
    with (
        DraftClient(server.endpoint, namespace="good", deadline=10.0) as client,
        DraftClient(server.endpoint, namespace="flood", deadline=30.0) as flood,
    ):
        client.ingest([1, 2, 3], [Response(TEXT)], epoch=0)
        client.step(client.open([[9]]), [[1]])
        sessions = flood.open(everybody)
        flood.step(sessions, [[1]] * len(sessions))
        refused = flood.stats().refused
        assert 0 < refused < len(sessions)
        assert "half of --memory" in caplog.text
        metrics = server.metrics()
        assert metrics["histospec_index_bytes"] < 16 << 20
        assert server.total("histospec_evicted_responses_total") == 0
        for _ in range(3):
            (draft,) = client.step(client.open([[1, 2, 3]]), [TEXT[:4]])
            assert draft.tokens[:3].tolist() == TEXT[4:7]
        flood.close(sessions, commit=False)
        flood.flush(10.0)
        flood.step(flood.open([[8]]), [[1]])
        assert flood.stats().refused == refused


def attack(endpoint: str, count: int, streams_count: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    async def both() -> tuple[Counter[str], Counter[str]]:
        return await asyncio.gather(messages(endpoint, count, seed=seed), streams(endpoint, streams_count, seed=seed))

    return asyncio.run(both())
