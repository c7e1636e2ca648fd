"""Without drafts an engine samples as one without speculation, at the same cost."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from histospec.client.vllm.patches import undrafted
from tests.support.engines import Prompts, StartEngine
from tests.support.servers import Server
from tests.vllm.conftest import RUNNER

pytestmark = pytest.mark.vllm


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many drafted tokens each step through the rejection sampler of vLLM's model runner had, in order."""
    seen = []

    def watch(module: str, name: str, drafted: Callable[..., int]) -> None:
        sampler = pytest.importorskip(module).RejectionSampler
        verify = getattr(sampler, name)

        def counted(self: Any, *args: Any) -> Any:
            seen.append(drafted(*args))
            return verify(self, *args)

        monkeypatch.setattr(sampler, name, counted)

    if RUNNER == "v2":
        module = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
        watch(module, "__call__", lambda logits, batch, *_: batch.num_draft_tokens)
    else:
        watch("vllm.v1.sample.rejection_sampler", "forward", lambda metadata, *_: sum(metadata.num_draft_tokens))
    return seen


@pytest.mark.newest
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
        {"temperature": 1, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1, "min_tokens": 5, "stop_token_ids": [1]},
    ],
    ids=["greedy", "temperature", "cut", "penalties", "stops"],
)
def test_same_tokens_as_without_speculation(
    engine: StartEngine,
    shared_server: Server,
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
    verified: list[int],
    sampling: dict[str, int] | dict[str, float] | dict[str, int | list[int]],
) -> None:
    """Every request has a seed, so random numbers that are drawn otherwise would show."""
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "1")
    plain, silent = engine(), engine(shared_server.endpoint)
    for seed in range(2):
        assert silent.generate(prompts, seed=seed, **sampling) == plain.generate(prompts, seed=seed, **sampling)
    assert verified == []


def test_drafts_are_verified_by_vllm(
    engine: StartEngine, shared_server: Server, prompts: Prompts, expected: list[Prompts], verified: list[int]
) -> None:
    rollouts = engine(shared_server.endpoint)
    for _ in range(2):
        assert rollouts.generate(prompts) == expected
    assert verified
    assert all(verified)


def test_logprobs_are_those_without_speculation(
    engine: StartEngine, shared_server: Server, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, verified: list[int]
) -> None:
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "1")
    plain, silent = engine(), engine(shared_server.endpoint)
    chosen = []
    for rollouts in (plain, silent):
        rollouts.start(prompts, temperature=1, seed=3, logprobs=2)
        done = []
        while rollouts.llm.llm_engine.has_unfinished_requests():
            done += rollouts.step()
        done.sort(key=lambda output: rollouts.ids.index(output.request_id))
        chosen.append([[entry.logprob for entry in step.values()] for o in done for step in o.outputs[0].logprobs])
    assert len(chosen[0]) == len(chosen[1])
    for a, b in zip(*chosen, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert verified == []


@pytest.mark.parametrize(
    ("drafts", "recurrent", "seen"), [({}, False, None), ({}, True, "config"), ({"a": [1]}, False, "config")]
)
def test_only_steps_without_drafts_are_shortened(
    drafts: dict[str, list[int]], recurrent: bool, seen: str | None
) -> None:
    runner = SimpleNamespace(speculative_config="config", model_config=SimpleNamespace(has_inner_state=recurrent))
    prepare = undrafted.undrafted(lambda self, step, counts: (self.speculative_config, counts))
    assert prepare(runner, SimpleNamespace(scheduled_spec_decode_tokens=drafts), 3) == (seen, 3)
    assert runner.speculative_config == "config"


def test_a_failure_leaves_the_configuration() -> None:
    runner = SimpleNamespace(speculative_config="config", model_config=SimpleNamespace(has_inner_state=False))

    def fail(self: Any, step: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        undrafted.undrafted(fail)(runner, SimpleNamespace(scheduled_spec_decode_tokens={}))
    assert runner.speculative_config == "config"


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = pytest.importorskip("vllm.v1.worker.gpu_model_runner")

    def prepare(self: Any, step: Any, padded: bool) -> None:
        """As some later version may have it."""

    monkeypatch.setattr(runners.GPUModelRunner, "_prepare_inputs", prepare)
    undrafted.install()
    assert runners.GPUModelRunner._prepare_inputs is prepare
    monkeypatch.delattr(runners, "GPUModelRunner")
    undrafted.install()
