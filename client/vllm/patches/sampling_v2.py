"""Coupled sampling with vLLM's model runner V2: verifies drafts by sampling, with vLLM's own sampler.

V2 samples the token of a position by argmax(log p + g), where g is Gumbel noise of (seed, position, token). Only its
verification of drafts is another one, a test of probabilities with random numbers of its own. The replacement samples
at every drafted place as V2 does without drafts, and accepts a drafted token if it is the sampled one. So a seed gives
the same text whatever is drafted, and the text of a request without a seed is as exact as without drafts.

V2 has processed the logits before: penalties, bad words, grammar, temperature, top-k, top-p. Nothing here waits for the
device.
"""

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from histospec.client.vllm.patches.replacing import is_replaced, replace, require

if TYPE_CHECKING:  # type checkers would take minutes for torch
    torch: Any
    Tensor = Any
else:
    import torch
    from torch import Tensor

logger = logging.getLogger("histospec.vllm")

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
NOISE = "vllm.v1.worker.gpu.sample.gumbel"

VERIFYING = [
    "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "expanded_idx_mapping",
    "expanded_local_pos", "temperature", "seed", "num_speculative_steps",
]  # fmt: skip
SAMPLING = ["logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting"]


def install() -> None:
    """Replaces V2's verification in this process, at most once. Raises RuntimeError if this vLLM does not fit."""
    module: Any = importlib.import_module(MODULE)
    noise: Any = importlib.import_module(NOISE)
    if is_replaced(module, "rejection_sample"):
        return
    require(module.rejection_sample, VERIFYING)
    require(noise.gumbel_sample, SAMPLING)
    replace(module, "rejection_sample", _sampling(module.rejection_sample, noise.gumbel_sample))
    logger.info("HistoSpec verifies drafts by coupled sampling")


def _sampling(rejection_sample: Any, gumbel_sample: Any) -> Any:
    """Returns `rejection_sample` that samples at every drafted place."""

    @functools.wraps(rejection_sample)
    def verify(
        target_logits: Any, draft_logits: Any, draft_sampled: Any, cu_num_logits: Any, pos: Any, idx_mapping: Any,
        expanded_idx_mapping: Any, expanded_local_pos: Any, temperature: Any, seed: Any, num_speculative_steps: int,
        *rest: Any, use_fp64: bool = False, **named: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        drawn = gumbel_sample(
            target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False, is_drafting=False,
            use_fp64=use_fp64,
        )  # fmt: skip
        return accepted(drawn, draft_sampled, cu_num_logits, expanded_local_pos, num_speculative_steps + 1)

    return verify


def accepted(drawn: Tensor, draft_sampled: Tensor, starts: Tensor, places: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the sampled tokens of each request, int64[requests, width], and how many of them count, int32[requests].

    Args:
        drawn: int64[rows], the token that was sampled in each row.
        draft_sampled: int[rows], the token that each row had as its input; -1 is accepted by none.
        starts: int[requests + 1], where the rows of each request start.
        places: int[rows], the number of each row within its request; the first row follows the last known token.
        width: at least the number of rows of any request.
    """
    rows, requests = len(drawn), len(starts) - 1
    request = torch.arange(requests, device=drawn.device).repeat_interleave(starts.diff(), output_size=rows)
    places = places.long()
    # A request stops at its last row, and where the sampled token is not the input of its next row.
    stops = (places.roll(-1) == 0) | (drawn != draft_sampled.roll(-1))
    last = drawn.new_full((requests,), width).scatter_reduce(0, request, torch.where(stops, places, width), "amin")
    sampled = drawn.new_zeros(requests, width)
    sampled[request, places] = drawn
    return sampled, (last + 1).int()
