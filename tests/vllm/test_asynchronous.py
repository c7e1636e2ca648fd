"""Drafts under asynchronous scheduling: vLLM's own scheduler and model runner V2, its kernels interpreted."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import asynchronous
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.v2]


def runner_of(rollouts: Any) -> Any:
    return rollouts.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@pytest.fixture
def start(engine: Callable[..., Any]) -> Callable[..., Any]:
    """start(endpoint) -> Rollouts of an engine that schedules asynchronously; further arguments are vLLM's."""
    asynchronous.keep_as_set()

    def started(endpoint: str, **arguments: Any) -> Any:
        rollouts = engine(endpoint, async_scheduling=True, **arguments)
        runner_of(rollouts).speculator.reconnect()  # the engine may have served another test
        return rollouts

    return started


def test_greedy_output_is_that_without_drafts(
    start: Callable[..., Any], shared_server: Server, prompts: list[list[int]], expected: list[list[list[int]]]
) -> None:
    rollouts = start(shared_server.endpoint)
    assert rollouts.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert type(rollouts.scheduler).__name__ == "HistoSpecAsyncScheduler"
    for _ in range(3):
        assert rollouts.generate(prompts) == expected
        print(
            {n: rollouts.counter(f"spec_decode_num_{n}") for n in ("draft_tokens", "accepted_tokens")},
            rollouts.verified,
        )
    assert rollouts.counter("spec_decode_num_accepted_tokens") > 200
