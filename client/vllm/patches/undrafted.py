"""Steps in which nothing was drafted cost what they cost without speculation.

As soon as any speculation is configured, vLLM samples every step through its rejection sampler, which copies the logits
and prepares the verification of no tokens at all: 1 to 3 % of a step on a CPU, where drafts have long vanished. Its
first half samples one token behind each draft, the "bonus token" of vLLM and of Leviathan et al. (2023). Without drafts
that is all there is to do, with the same random numbers.
"""

import functools
import importlib
import logging
from typing import Any

from .replacing import is_replaced, parameters, replace

logger = logging.getLogger("histospec.vllm")

PARAMETERS = ["self", "metadata", "draft_probs", "logits", "sampling_metadata"]


def install() -> None:
    """Shortens vLLM's RejectionSampler where it has the form that is known, once a process; else leaves it alone."""
    sampler: Any = getattr(importlib.import_module("vllm.v1.sample.rejection_sampler"), "RejectionSampler", None)
    forward = getattr(sampler, "forward", None)
    if forward is None or parameters(forward) != PARAMETERS:
        logger.info("HistoSpec: this vLLM has another RejectionSampler; steps without drafts cost a little more")
    elif not is_replaced(sampler, "forward"):
        replace(sampler, "forward", shortened(forward))


def shortened(forward: Any) -> Any:
    """`forward`, unless nothing was drafted and no log-probabilities are wanted."""

    @functools.wraps(forward)
    def sample(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if metadata.max_spec_len or sampling_metadata.max_num_logprobs is not None:
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata, predict_bonus_token=True)

    return sample
