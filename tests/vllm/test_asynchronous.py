"""Drafts under asynchronous scheduling: vLLM's own scheduler and model runner V2, its kernels interpreted.

`HISTOSPEC_TEST_ASYNC=1` runs the other tests of the adapter with asynchronous scheduling, too.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import accepting, any_drafts
from tests.support.asynchronous import Client, draft_of, speculator_of
from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, let_workers_know
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.v2]


@pytest.fixture
def start(engine: Callable[..., Any]) -> Callable[..., Any]:
    """start(endpoint) -> Rollouts of an engine that schedules asynchronously; further arguments are vLLM's."""
    return lambda endpoint, **arguments: engine(endpoint, async_scheduling=True, **arguments)


def test_greedy_output_is_that_without_drafts(
    start: Callable[..., Any], shared_server: Server, prompts: Prompts, expected: list[Prompts], make_client: MakeClient
) -> None:
    """
    1. With asynchronous scheduling, the output of three visits is that without drafts; the history is exact.
    2. From the second visit on most tokens are drafted, with few places more than accepted.
    """
    rollouts = start(shared_server.endpoint)
    assert rollouts.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    assert type(rollouts.scheduler).__name__ == "HistoSpecAsyncScheduler"
    for _ in range(2):
        assert rollouts.generate(prompts) == expected
    before = [rollouts.counter(f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")]
    assert rollouts.generate(prompts) == expected
    after = [rollouts.counter(f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")]
    places, accepted = (b - a for a, b in zip(before, after, strict=True))
    assert accepted > 300
    assert places < 1.3 * accepted
    client = make_client(shared_server.endpoint)
    for prompt, group in zip(prompts, expected, strict=True):
        assert texts(client.history(prompt)) == group * 3


@pytest.fixture
def anyhow(
    start: Callable[..., Any], nowhere: str, expected: list[Prompts], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """anyhow(...) -> Rollouts with right, wrong, cut, long, late and missing drafts at random, in random places."""
    whole = [[*prompt, *response[0]] for prompt, response in zip(prompts, expected, strict=True)]
    chance = random.Random(5)

    def draft(text: list[int]) -> Any:
        return draft_of(any_drafts.tokens(chance, any_drafts.rest_of(whole, text)))

    def started(**arguments: Any) -> Any:
        from histospec.client.vllm.asynchronous import speculator

        made = Client(draft, lambda: chance.choice((0, 0, 0, 1, 2, None)))
        monkeypatch.setattr(speculator, "DraftClient", lambda: made)
        rollouts = start(nowhere, **arguments)
        rollouts.scheduler._most_places = lambda: chance.randint(0, 16)
        rollouts.client = made
        return rollouts

    return started


def sessions_left(rollouts: Any) -> int:
    """How many sessions the worker still has open when it knows that all requests have ended."""
    let_workers_know(rollouts.llm)
    return len(rollouts.client.texts)


@any_drafts.SCHEDULES
def test_any_draft_leaves_the_output_as_it_is(
    anyhow: Callable[..., Any], prompts: Prompts, expected: list[Prompts], arguments: Any
) -> None:
    rollouts = anyhow(**arguments)
    assert rollouts.generate(prompts) == expected
    assert 0 < rollouts.counter("spec_decode_num_accepted_tokens") < rollouts.counter("spec_decode_num_draft_tokens")
    if "num_gpu_blocks_override" in arguments:
        assert rollouts.counter("num_preemptions") > 0
    assert sessions_left(rollouts) == 0


def test_a_sampler_that_accepts_any_token_is_noticed(
    anyhow: Callable[..., Any], prompts: Prompts, expected: list[Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the bed: if this were not noticed, the test above would show nothing."""
    accepting.make(monkeypatch)
    assert anyhow().generate(prompts) != expected


@pytest.mark.parametrize("steps", range(6))
def test_reset_and_abort_in_each_phase(
    anyhow: Callable[..., Any], prompts: Prompts, expected: list[Prompts], steps: int
) -> None:
    """
    1. After 0 to 5 steps every third request is aborted, and all others are reset while their tokens are on the way.
    2. The others' output is that without drafts; every session is closed.
    """
    rollouts = anyhow()
    rollouts.start(prompts)
    rollouts.step(steps)
    rollouts.llm.llm_engine.abort_request(rollouts.ids[::3])
    rollouts.step(1)
    core = rollouts.llm.llm_engine.engine_core.engine_core
    assert core.reset_prefix_cache(reset_running_requests=True)
    done = rollouts.finish()
    assert [done[i] for i in range(len(prompts)) if i % 3] == [expected[i] for i in range(len(prompts)) if i % 3]
    assert sessions_left(rollouts) == 0


def test_a_server_that_is_killed_and_restarted(
    start: Callable[..., Any], server: Server, prompts: Prompts, expected: list[Prompts]
) -> None:
    """
    1. The server is killed in the middle of a visit and restarted in the middle of the next: the output stays.
    2. Then drafts are back.
    """
    rollouts = start(server.endpoint)
    rollouts.generate(prompts)
    rollouts.start(prompts)
    rollouts.step(4)
    server.kill()
    assert rollouts.finish() == expected
    rollouts.start(prompts)
    rollouts.step(4)
    server.start()
    assert rollouts.finish() == expected
    before = rollouts.counter("spec_decode_num_accepted_tokens")
    for _ in range(3):  # the client tries again after a pause
        assert rollouts.generate(prompts) == expected
    assert rollouts.counter("spec_decode_num_accepted_tokens") > before


def test_the_host_reads_nothing_from_the_device_before_a_step_ends(
    anyhow: Callable[..., Any], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each read would wait for the forward pass; only the copies that vLLM has begun are waited for."""
    from histospec.client.vllm.asynchronous import speculator
    from histospec.client.vllm.patches import runner_v2
    from tests.support import host_reads

    reads: list[str] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with host_reads.counted() as found:
                result = function(*args, **named)
            reads.extend(found)
            return result

        return call

    for owner, name in ((runner_v2, "put"), (speculator.Speculator, "propose")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    rollouts = anyhow()
    rollouts.generate(prompts)
    assert rollouts.counter("spec_decode_num_draft_tokens") > 0
    assert reads == []


def test_a_request_without_a_session_gets_no_places(
    anyhow: Callable[..., Any], prompts: Prompts, expected: list[Prompts]
) -> None:
    rollouts = anyhow()
    assert rollouts.generate(prompts, extra_args={"histospec": False}) == expected
    assert rollouts.counter("spec_decode_num_draft_tokens") == 0
    assert speculator_of(rollouts.llm) is not None
