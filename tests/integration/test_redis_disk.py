"""A Redis whose disk is full: the server refuses what it cannot keep, and still drafts; it stores again when it can."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from histospec.client import DraftClient, HistoSpecError, Response
from tests.support.clients import flushed, texts
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Starter
from tests.support.waiting import eventually

TEXT = list(range(100, 140))


def stored(client: DraftClient) -> bool:
    client.ingest([3], [Response(TEXT)], epoch=0)
    return True


def long_text(number: int) -> list[int]:
    """Returns a response of about 60 KB on disk."""
    tokens: list[int] = np.random.default_rng(number).integers(0, 150_000, 20_000).tolist()
    return tokens


@pytest.mark.parametrize("appendfsync", ["everysec", "always"])
def test_a_full_disk_beside_redis_costs_nothing_that_was_acknowledged(
    start_server: Starter, disk: Path, start_redis: Callable[..., RedisProcess], appendfsync: str
) -> None:
    """
    1. Ingests fill the disk of Redis. Redis then refuses writes or, with `always`, ends.
    2. The shard reports that the store is full or away; it still drafts, and refuses a commit for now.
    3. There is space again, and Redis restarts if it ended: the shard stores again, also that commit.
    4. Redis has everything that was acknowledged, also after a crash.
    """
    redis = start_redis("--appendfsync", appendfsync, folder=disk)
    server = start_server("--store", redis.url)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    acknowledged: list[int] = []
    with DraftClient(server.endpoint, namespace="run", deadline=5.0) as client:
        client.ingest([1], [Response(TEXT)], epoch=0)

        def fill() -> None:
            for number in range(100):
                client.ingest([2], [Response(long_text(number))], epoch=0)
                acknowledged.append(number)

        with pytest.raises(HistoSpecError) as refused:
            fill()
        assert acknowledged
        if appendfsync == "always":
            assert redis.process.wait(60) != 0
            assert "store" in str(refused.value)
        else:
            assert "the disk of the Redis server is full" in str(refused.value)
            assert len(str(refused.value)) < 300

        (session,) = client.open([[1]])
        assert client.step([session], [TEXT[:4]])[0].tokens[:2].tolist() == TEXT[4:6]
        client.close([session], epochs=0)
        client.flush(20.0)
        stats = client.stats()
        assert (stats.commits, stats.pending_commits, stats.dropped_commits) == (0, 1, 0)
        assert server.get("/readyz")[0] == 200

        ballast.unlink()
        if not redis.running:
            redis.start()
        eventually(lambda: stored(client), "nothing is stored", HistoSpecError)
        eventually(lambda: flushed(client, 1.0).commits == 1, "the refused commit is not sent again")
        redis.kill()
        redis.start()
        assert texts(client.history([1])) == [TEXT, TEXT[:4]]
        kept = texts(client.history([2]))
        assert all(long_text(number) in kept for number in acknowledged)
        assert TEXT in texts(client.history([3]))
    assert server.metrics()["histospec_store_errors_total"] >= 2
