"""What trainers replay: the experts that each token went through, and the tokens that sampling could choose from.

vLLM returns both with its model runner V2 only. They are the same with and without drafts.
"""

from typing import Any

import numpy as np
import pytest

from tests.support import any_drafts
from tests.support.engines import Prompts, StartEngine
from tests.support.tiny_policy import VOCABULARY

pytestmark = [pytest.mark.vllm, pytest.mark.v2]

EXPERTS, LAYERS, CHOSEN = 4, 2, 2  # of the fixture's mixture
BLOCK = 32
REPLAY = {
    "enable_return_routed_experts": True, "return_sampling_mask": True, "logprobs_mode": "processed_logprobs",
    "block_size": BLOCK, "max_model_len": 128, "max_num_seqs": 4,
}  # fmt: skip
# Nearly greedy, so that random numbers decide nothing, and four tokens to choose from.
SAMPLING = {"temperature": 0.001, "top_k": 4, "max_tokens": 16, "logprobs": 1, "seed": 1}


def visit(rollouts: Any, prompts: Prompts) -> list[Any]:
    """Returns the first completion of each prompt."""
    rollouts.start(prompts, **SAMPLING)
    return [output.outputs[0] for output in rollouts.outputs()]


def test_replayed_data_are_those_without_drafts(
    engine: StartEngine, nowhere: str, mixture: str, prompts: Prompts
) -> None:
    """In a second visit, too, whose prompts are in the prefix cache."""
    long: Prompts = [[*range(VOCABULARY), *prompt] for prompt in prompts[:3]]
    plain = visit(engine(model=mixture, **REPLAY), long)
    drafting = engine(nowhere, model=mixture, **REPLAY)
    any_drafts.make(drafting.scheduler, [[*prompt, *one.token_ids] for prompt, one in zip(long, plain, strict=True)])
    for _ in range(2):
        for prompt, one, other in zip(long, visit(drafting, long), plain, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert one.routed_experts.shape == (len(prompt) + len(one.token_ids) - 1, LAYERS, CHOSEN)
            assert np.array_equal(one.routed_experts, other.routed_experts)
            assert [sorted(tokens) for tokens in one.sampling_mask.token_ids] == [
                sorted(tokens) for tokens in other.sampling_mask.token_ids
            ]
            assert all(len(tokens) == SAMPLING["top_k"] for tokens in one.sampling_mask.token_ids)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
    assert len({expert for one in plain for expert in one.routed_experts.ravel().tolist()}) == EXPERTS
    assert 0 < drafting.counter("spec_decode_num_accepted_tokens") < drafting.counter("spec_decode_num_draft_tokens")
    assert drafting.counter("prefix_cache_hits") >= len(long) * BLOCK
