"""Makes steps without drafts cost what they cost without speculation.

If any speculation is configured, vLLM samples every step through its rejection sampler. In a step without drafts it
copies the logits and prepares the verification of no tokens, which takes 1 to 3 % of the step on a CPU. The first half
of the rejection sampler samples one token after each draft, the "bonus token" of vLLM and of Leviathan et al. (2023).
Without drafts this is all that is needed, and it uses the same random numbers.
"""

import functools
import importlib
import logging
from typing import Any

from .replacing import is_replaced, parameters, replace

logger = logging.getLogger("histospec.vllm")

PARAMETERS = ["self", "metadata", "draft_probs", "logits", "sampling_metadata"]


def install() -> None:
    """Shortens vLLM's RejectionSampler, at most once per process, if it has the known form."""
    sampler: Any = getattr(importlib.import_module("vllm.v1.sample.rejection_sampler"), "RejectionSampler", None)
    forward = getattr(sampler, "forward", None)
    if forward is None or parameters(forward) != PARAMETERS:
        logger.info("HistoSpec: this vLLM has another RejectionSampler; steps without drafts cost a little more")
    elif not is_replaced(sampler, "forward"):
        replace(sampler, "forward", shortened(forward))


def shortened(forward: Any) -> Any:
    """Returns `forward` with a short way if nothing was drafted and the batch asks for no log-probabilities."""

    @functools.wraps(forward)
    def sample(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if metadata.max_spec_len or sampling_metadata.max_num_logprobs is not None:
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata, predict_bonus_token=True)

    return sample
