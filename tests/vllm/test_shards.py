"""Real vLLM with three shards that store their responses in a Redis Cluster."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine
from tests.support.redis_processes import RedisCluster
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.newest]


@pytest.fixture
def shards(start_server: Starter, redis_cluster: RedisCluster) -> dict[str, Server]:
    names = ("shard-0", "shard-1", "shard-2")
    return {name: start_server("--store", redis_cluster.url, "--shard-name", name) for name in names}


@pytest.fixture
def endpoint(shards: dict[str, Server]) -> str:
    return ",".join(f"{name}={shard.endpoint}" for name, shard in shards.items())


@pytest.fixture
def hits(namespace: str) -> Callable[[Server], float]:
    """hits(shard) -> how often it had a draft."""
    return lambda shard: shard.metrics().get(f'histospec_drafts_total{{namespace="{namespace}",result="hit"}}', 0)


def test_every_shard_drafts_its_part(
    engine: StartEngine,
    shards: dict[str, Server],
    endpoint: str,
    hits: Callable[[Server], float],
    prompts: Prompts,
    expected: list[Prompts],
) -> None:
    rollouts = engine(endpoint)
    for _ in range(2):
        assert rollouts.generate(prompts) == expected
    assert all(hits(shard) for shard in shards.values())


def test_the_environment_of_a_worker_says_when_a_shard_leaves(
    engine: StartEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_LEAVE_SECONDS", "600")
    rollouts = engine(f"discover://{server.endpoint}")
    assert rollouts.scheduler._sessions.client.config.timeouts.leave == 600


@pytest.mark.parametrize("fault", ["killed", "hanging"])
def test_a_shard_fails_half_way(
    engine: StartEngine,
    shards: dict[str, Server],
    endpoint: str,
    hits: Callable[[Server], float],
    prompts: Prompts,
    expected: list[Prompts],
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """
    1. Each shard has written and stored its problems; half-way through the next visit one of them fails.
    2. The engine goes on, and writes the same; so it does for a whole visit without that shard.
    3. The shard is back, empty, and drafts again from what the store has. Every response was kept.
    """
    import signal

    monkeypatch.setenv("HISTOSPEC_DEADLINE", "0.3")
    rollouts = engine(endpoint)
    assert rollouts.generate(prompts) == expected
    failing = shards["shard-1"]
    rollouts.start(prompts)
    rollouts.step(2)
    assert rollouts.scheduler.running
    if fault == "killed":
        failing.kill()
    else:
        failing.signal(signal.SIGSTOP)
    assert rollouts.finish() == expected
    assert rollouts.generate(prompts) == expected
    if fault == "killed":
        failing.start()
    else:
        failing.signal(signal.SIGCONT)
    visits = [3]
    before = hits(failing)

    def drafts_again() -> Any:
        visits[0] += 1
        assert rollouts.generate(prompts) == expected
        return hits(failing) > before

    eventually(drafts_again, "the shard does not draft again")
    said = rollouts.scheduler._sessions.client

    def all_acknowledged() -> Any:
        said.flush(1)
        return said.stats().commits == visits[0] * len(prompts)

    eventually(all_acknowledged, "the store does not get every response")
    monkeypatch.setenv("HISTOSPEC_DEADLINE", "5")
    client = make_client(endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        kept = texts(client.history(prompt))
        assert len(kept) >= visits[0]  # one whose acknowledgement was lost with its shard may be there twice
        assert all([tokens] == group for tokens in kept)
