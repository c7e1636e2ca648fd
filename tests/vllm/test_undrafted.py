"""Without drafts an engine samples as one without speculation, at the same cost."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from histospec.client.vllm.patches import undrafted
from tests.support.servers import Server

pytestmark = pytest.mark.vllm


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many drafted tokens each step through vLLM's whole rejection sampler had, in order."""
    rejection_sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")

    forward = rejection_sampler.RejectionSampler.forward
    forward = getattr(forward, "__wrapped__", forward)
    seen = []

    def counted(self: Any, metadata: Any, *args: Any) -> Any:
        seen.append(sum(metadata.num_draft_tokens))
        return forward(self, metadata, *args)

    monkeypatch.setattr(rejection_sampler.RejectionSampler, "forward", undrafted.shortened(counted))
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
    engine: Callable[..., Any],
    shared_server: Server,
    prompts: list[list[int]],
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
    engine: Callable[..., Any],
    shared_server: Server,
    prompts: list[list[int]],
    expected: list[list[list[int]]],
    verified: list[int],
) -> None:
    rollouts = engine(shared_server.endpoint)
    for _ in range(2):
        assert rollouts.generate(prompts) == expected
    assert verified
    assert all(verified)


def test_logprobs_are_left_to_vllm(
    engine: Callable[..., Any],
    shared_server: Server,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    verified: list[int],
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
    assert not any(verified)  # vLLM 0.27 asks its rejection sampler nothing where nothing was drafted, 0.32 does


@pytest.mark.parametrize(("drafted", "logprobs"), [(0, None), (0, 2), (3, None), (3, 0)])
def test_only_what_needs_no_verification_is_left_out(drafted: int, logprobs: int | None) -> None:
    sampler = SimpleNamespace(sampler=lambda **arguments: ("sampled", arguments["logits"]))
    sample = undrafted.shortened(lambda self, metadata, draft_probs, logits, sampling: ("verified", logits))
    metadata, sampling = SimpleNamespace(max_spec_len=drafted), SimpleNamespace(max_num_logprobs=logprobs)
    how = "sampled" if (drafted, logprobs) == (0, None) else "verified"
    assert sample(sampler, metadata, None, "logits", sampling) == (how, "logits")


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rejection_sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")

    def forward(self: Any, metadata: Any, draft_logits: Any, logits: Any, sampling_metadata: Any) -> None:
        """As some later version may have it."""

    monkeypatch.setattr(rejection_sampler.RejectionSampler, "forward", forward)
    undrafted.install()
    assert rejection_sampler.RejectionSampler.forward is forward
    monkeypatch.delattr(rejection_sampler, "RejectionSampler")
    undrafted.install()
