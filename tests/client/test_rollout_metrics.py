"""RolloutMetrics: the metrics of a training step, with a real server that may be away or restart."""

import logging
from collections.abc import Iterator

import pytest

from histospec.client import DraftClient, Response
from histospec.client.rollouts import RolloutMetrics
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

TEXT = list(range(10, 60))
KNOWN, NEW = [1], [2]


@pytest.fixture
def client(server: Server) -> Iterator[DraftClient]:
    with DraftClient(server.endpoint, "run", deadline=60.0) as client:
        client.ingest(KNOWN, [Response(TEXT)])
        yield client


def roll_out(client: DraftClient, prompt: list[int], wrong: bool = False) -> tuple[int, int, int]:
    """Generates TEXT as an engine would, or other text. -> steps, drafted tokens, accepted tokens."""
    text = TEXT[:1] + [1000 + token for token in TEXT[1:]] if wrong else TEXT
    (session,) = client.open([prompt])
    steps = drafted = accepted = at = 0
    new = text[:1]
    while at + len(new) < len(text):
        at += len(new)
        (draft,) = client.step([session], [new], max_tokens=8)
        good = 0
        while good < len(draft) and text[at + good : at + good + 1] == [draft.tokens[good]]:
            good += 1
        new = text[at : at + good + 1]
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + good
    client.step([session], [new], max_tokens=0)
    client.close([session], commit=False)
    client.step(client.open([NEW]), [[7]])  # waits until the server has all of that
    return steps, drafted, accepted


def test_a_step_at_a_time(client: DraftClient) -> None:
    metrics = RolloutMetrics(client)
    assert metrics.collect() == {}
    assert set(metrics.collect(every=60, absent=0.0).values()) == {0.0}
    steps, drafted, accepted = roll_out(client, KNOWN)
    first = metrics.collect()
    assert accepted > 20
    assert drafted - accepted < 8
    assert first["histospec/accept_rate"] == accepted / drafted
    assert first["histospec/tokens_per_step"] == pytest.approx(len(TEXT) / steps, rel=0.2)
    assert 0 < first["histospec/draft_share"] <= 1
    assert first["histospec/cache_hit_rate"] == 0.5  # the known problem, and the new one that is opened last
    assert "histospec/model_accept_rate" not in first
    roll_out(client, KNOWN, wrong=True)
    second = metrics.collect()
    assert second["histospec/accept_rate"] == 0
    assert second["histospec/tokens_per_step"] == pytest.approx(1, rel=0.05)
    assert metrics.collect() == {}


def test_validation_is_left_out(client: DraftClient) -> None:
    metrics = RolloutMetrics(client, prefix="")
    roll_out(client, KNOWN, wrong=True)
    metrics.pause()
    roll_out(client, KNOWN)
    metrics.resume()
    found = metrics.collect()
    assert (found["accept_rate"], found["cache_hit_rate"]) == (0, 0.5)
    metrics.pause()
    roll_out(client, KNOWN)
    assert metrics.collect() == {}


def test_the_last_result_for_a_while(client: DraftClient) -> None:
    metrics = RolloutMetrics(client)
    roll_out(client, KNOWN)
    first = metrics.collect()
    roll_out(client, KNOWN, wrong=True)
    assert metrics.collect(every=3600) == first
    assert metrics.collect(every=3600, absent=0.0) == first | {"histospec/model_accept_rate": 0.0}
    assert metrics.collect()["histospec/accept_rate"] == 0


def test_a_drafter_of_the_model(client: DraftClient) -> None:
    metrics = RolloutMetrics(client, prefix="")
    (session,) = client.open([NEW])
    client.step([session], [[5]])
    client.step([session], [[6, 7, 8]], verified=[0], model_drafted=[4], model_accepted=[2])
    found = metrics.collect()
    assert found["model_accept_rate"] == 0.5
    assert found["tokens_per_step"] == pytest.approx(2)


def test_a_server_that_is_away_and_forgets_its_counters(
    server: Server, client: DraftClient, caplog: pytest.LogCaptureFixture
) -> None:
    """
    1. A step rolls out, and the server dies: the step has no metrics, and one line says so.
    2. The server is back, with new counters: the metrics are those since then.
    """
    metrics = RolloutMetrics(client, prefix="", timeout=0.5)
    roll_out(client, KNOWN, wrong=True)
    assert metrics.collect()["accept_rate"] == 0
    roll_out(client, KNOWN, wrong=True)
    server.kill()
    with caplog.at_level(logging.WARNING, "histospec.client"):
        assert metrics.collect() == metrics.collect() == {}
    assert sum("no metrics of drafts" in record.getMessage() for record in caplog.records) == 1
    server.restart()
    eventually(lambda: len(client.history(KNOWN)) == 1 and roll_out(client, KNOWN)[2] > 20, "no drafts after a restart")
    assert metrics.collect()["accept_rate"] > 0.5


def test_every_shard_counts(start_server: Starter) -> None:
    shards = [start_server("--shard-name", name) for name in ("a", "b")]
    endpoint = ",".join(f"{name}={shard.endpoint}" for name, shard in zip("ab", shards, strict=True))
    prompts = [[n] for n in range(100, 140)]
    with DraftClient(endpoint, "run", deadline=60.0) as client:
        client.ingest_many(prompts[:10], [[Response(TEXT)]] * 10)
        metrics = RolloutMetrics(client, prefix="")
        sessions = client.open(prompts)
        client.step(sessions, [[7]] * 40)
        assert metrics.collect()["cache_hit_rate"] == 0.25
