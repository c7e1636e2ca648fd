"""Drafts under asynchronous scheduling: vLLM's own scheduler and model runner V2, its kernels interpreted.

`HISTOSPEC_TEST_ASYNC=1` runs the other tests of the adapter with asynchronous scheduling, too.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import accepting, any_drafts, sampling_check
from tests.support.asynchronous import Client, draft_of, speculator_of
from tests.support.clients import texts
from tests.support.engines import MakeClient, Prompts, StartEngine, let_workers_know
from tests.support.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.v2]

RESPONSES = 1_000  # interpreted kernels are slow
BLOCK = 32  # tokens of the prefix cache's blocks


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
    """anyhow(...) -> Rollouts with right, wrong, cut, long, late and missing drafts at random, in random places.

    `right`: texts that right drafts continue, instead of the prompts with what the engine writes.
    """
    written = [[*prompt, *response[0]] for prompt, response in zip(prompts, expected, strict=True)]
    chance = random.Random(5)

    def started(right: list[list[int]] = written, **arguments: Any) -> Any:
        from histospec.client.vllm.asynchronous import speculator

        def draft(text: list[int]) -> Any:
            return draft_of(any_drafts.tokens(chance, any_drafts.rest_of(right, text)))

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


def test_cached_blocks_are_those_without_drafts(
    anyhow: Callable[..., Any], engine: StartEngine, prompts: Prompts
) -> None:
    """A second turn begins with blocks that drafts filled in the first one, accepted and rejected."""
    first_turn = [[*range(BLOCK), *prompt] for prompt in prompts[:6]]
    plain = engine(block_size=BLOCK)
    written = plain.generate(first_turn)
    second_turn = [[*prompt, *response] for prompt, (response,) in zip(first_turn, written, strict=True)]
    expected = plain.generate(second_turn)
    whole = [[*prompt, *response] for prompt, (response,) in zip(second_turn, expected, strict=True)]
    rollouts = anyhow(whole, block_size=BLOCK)
    assert rollouts.generate(first_turn) == written
    before = rollouts.counter("prefix_cache_hits")
    assert rollouts.generate(second_turn) == expected
    assert rollouts.counter("prefix_cache_hits") - before >= 2 * BLOCK * len(second_turn)
    assert 0 < rollouts.counter("spec_decode_num_accepted_tokens") < rollouts.counter("spec_decode_num_draft_tokens")


def test_a_sampler_that_accepts_any_token_is_noticed(
    anyhow: Callable[..., Any], prompts: Prompts, expected: list[Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the bed: if this were not noticed, the test above would show nothing."""
    accepting.make(monkeypatch)
    assert anyhow().generate(prompts) != expected


@pytest.mark.parametrize("accepts", [False, True], ids=["", "accepting"])
def test_sampling_is_exact(
    anyhow: Callable[..., Any], engine: StartEngine, tiny_model: str, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    """Probable, improbable, cut, late and missing drafts. A sampler that accepts any token is the control."""
    prompt = sampling_check.PROMPT
    ((probable,),) = engine().generate([prompt], max_tokens=sampling_check.LENGTH)
    if accepts:
        accepting.make(monkeypatch)
    rollouts = anyhow([[*prompt, *probable]], **sampling_check.ENGINE)
    result = sampling_check.check(rollouts.llm, tiny_model, RESPONSES)
    assert 0 < result["accepted"] < result["drafted"]
    assert (max(result["z"]) > sampling_check.LIMIT) == accepts, result


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


def test_places_that_no_draft_fills_are_not_computed(
    anyhow: Callable[..., Any], prompts: Prompts, expected: list[Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. The scheduler reserves more places than drafts fill: the model computes the drafted tokens only.
    2. The cost model, vLLM's metrics and the demo's counter count these.
    """
    from examples.tiny_rl.rollout import StepCounter

    rollouts = anyhow()
    core = rollouts.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    scheduled: list[tuple[int, int]] = []  # tokens of a step, reserved places among them
    drafted, computed, learned = [], [], []

    def watched(owner: Any, name: str, see: Callable[..., Any]) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            see(result, *args)
            return result

        monkeypatch.setattr(owner, name, call)

    def see_step(step: Any, *args: Any) -> None:
        if step.total_num_scheduled_tokens:
            reserved = sum(map(len, step.scheduled_spec_decode_tokens.values()))
            scheduled.append((step.total_num_scheduled_tokens, reserved))

    def see_batch(batch: Any, *args: Any) -> None:
        computed.append(batch.num_tokens)
        drafted.append(batch.num_draft_tokens)

    watched(rollouts.scheduler, "schedule", see_step)
    watched(runner, "prepare_inputs", see_batch)
    watched(
        rollouts.scheduler._chooser, "observe", lambda result, seconds, sequences, tokens, *args: learned.append(tokens)
    )
    monkeypatch.setattr(rollouts.scheduler, "update_from_output", rollouts.scheduler.update_from_output)  # to be undone
    counter = StepCounter(rollouts.llm)
    assert rollouts.generate(prompts) == expected
    assert 0 < sum(drafted) < sum(places for _, places in scheduled)
    plain = [tokens - places for tokens, places in scheduled]
    assert computed == [tokens + more for tokens, more in zip(plain, drafted, strict=True)]
    learned = [tokens for tokens in learned if tokens]
    assert learned == computed[: len(learned)]
    assert len(computed) - len(learned) <= 1  # the engine is idle: the outcome of a step too many is not read
    late = 16 * len(prompts)  # the tokens of steps too many, of requests that have ended
    assert sum(drafted) - late <= rollouts.counter("spec_decode_num_draft_tokens") <= sum(drafted)
    assert sum(drafted) - late <= counter.counts.drafted <= sum(drafted)


@pytest.mark.parametrize(("budget", "running", "waiting", "most"), [
    (8192, 256, 0, 16), (2048, 256, 0, 7), (2048, 256, 1, 3), (256, 256, 0, 0), (100, 256, 5, 0), (64, 0, 3, 16),
])  # fmt: skip
def test_places_leave_tokens_for_the_other_requests_of_a_step(
    anyhow: Callable[..., Any], budget: int, running: int, waiting: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = anyhow().scheduler
    monkeypatch.undo()
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", budget)
    monkeypatch.setattr(scheduler, "running", [None] * running)
    monkeypatch.setattr(scheduler, "requests", dict.fromkeys(range(running + waiting)))
    assert type(scheduler)._most_places(scheduler) == most
