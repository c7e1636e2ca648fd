"""Coupled sampling inside vLLM, by four functions that it replaces. They run after vLLM's processing of the logits.

- GPUModelRunner._sample: keeps the seeds and places of the batch's rows while it samples (coupled/rows.py);
- TopKTopPSampler.forward: draws the token after every draft, and all tokens without drafts;
- rejection_sampler.rejection_sample: verifies drafted tokens;
- GPUModelRunner.sample_tokens: adds the alternatives of the sampled tokens to its output.

It checks their signatures first and refuses a vLLM with others, because independent draws look like coupled draws that
do not repeat.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from histospec.client.vllm.coupled.alternatives import ATTRIBUTE
from histospec.client.vllm.coupled.places import Texts
from histospec.client.vllm.coupled.rows import CoupledRows
from histospec.client.vllm.patches.replacing import attach, is_replaced, replace, require

if TYPE_CHECKING:
    torch: Any
else:
    import torch

logger = logging.getLogger("histospec.vllm")

VERIFYING = [
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits",
    "bonus_token_ids", "sampling_metadata",
]  # fmt: skip

_coupled: CoupledRows | None = None  # of the present batch; a worker samples in one thread
_sampled: CoupledRows | None = None  # those of the batch whose output vLLM is making


def install() -> None:
    """Replaces the functions in this process, at most once. Raises RuntimeError if this vLLM does not fit."""
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    rejection: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    if is_replaced(runner, "_sample"):
        return
    require(runner._sample, ["self", "logits", "spec_decode_metadata"])
    require(rejection.rejection_sample, VERIFYING)
    require(runner.sample_tokens, ["self", "grammar_output"])
    replace(runner, "_sample", _remembering(runner._sample))
    replace(rejection, "rejection_sample", _verifying(rejection.rejection_sample))
    replace(runner, "sample_tokens", _giving(runner.sample_tokens))
    logger.info("HistoSpec samples requests with a seed by coupled sampling")


def _remembering(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Returns GPUModelRunner._sample that sets the coupled rows while it runs."""

    @functools.wraps(sample)
    def remember(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        global _coupled, _sampled
        batch = self.input_batch
        if not batch.generators:
            return sample(self, logits, spec_decode_metadata)
        if self.use_async_scheduling:
            raise RuntimeError(
                "HISTOSPEC_SAMPLING=coupled needs async_scheduling=False (--no-async-scheduling): the noise of a token "
                "depends on the token before it, which an asynchronous scheduler does not know yet"
            )
        couple(self.sampler.topk_topp_sampler)
        texts = self.__dict__.setdefault("_histospec_texts", Texts())
        drafted = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        _coupled = CoupledRows(batch, drafted, texts)
        try:
            output = sample(self, logits, spec_decode_metadata)
            _sampled = _coupled
            return output
        finally:
            _coupled = None

    return remember


def _giving(sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Returns GPUModelRunner.sample_tokens that adds the alternatives of the sampled tokens to its output."""

    @functools.wraps(sample_tokens)
    def give(self: Any, *arguments: Any, **named: Any) -> Any:
        global _sampled
        _sampled = None
        output = sample_tokens(self, *arguments, **named)
        coupled, _sampled = _sampled, None
        if coupled is not None:
            attach(output, ATTRIBUTE, coupled.alternatives(output.req_ids, output.sampled_token_ids))
        return output

    return give


def couple(sampler: Any) -> None:
    """Makes a TopKTopPSampler draw the coupled rows, at most once. Each sampler has a `forward` of its own."""
    if is_replaced(sampler, "forward"):
        return
    require(sampler.forward, ["logits", "generators", "k", "p"])
    filtered: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
    forward = sampler.forward

    @functools.wraps(forward)
    def draw(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        coupled = _coupled
        if coupled is None:
            return forward(logits, generators, k, p)
        logits = filtered(logits, k, p)
        chosen = coupled.choose(logits)
        if len(coupled.rows) == len(logits) and not str(sampler.logprobs_mode).startswith("processed"):
            return chosen, None
        tokens, processed = forward(logits, {}, None, None)
        tokens[coupled.rows] = chosen.to(tokens.dtype)
        return tokens, processed

    replace(sampler, "forward", draw)


def _verifying(rejection_sample: Callable[..., Any]) -> Callable[..., Any]:
    """Returns rejection_sample that verifies the coupled rows itself."""

    @functools.wraps(rejection_sample)
    def verify(
        draft_token_ids: Any, num_draft_tokens: Any, max_spec_len: Any, cu_num_draft_tokens: Any, draft_probs: Any,
        target_logits: Any, bonus_token_ids: Any, sampling_metadata: Any, *rest: Any, **named: Any,
    ) -> Any:  # fmt: skip
        coupled = _coupled
        if coupled is None or len(coupled.rows) < len(num_draft_tokens):
            output = rejection_sample(
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                bonus_token_ids, sampling_metadata, *rest, **named,
            )  # fmt: skip
        else:
            output = bonus_token_ids.new_empty((len(num_draft_tokens), max_spec_len + 1), dtype=torch.int32)
        if coupled is not None:
            starts = list(accumulate(num_draft_tokens, initial=0))
            coupled.verify(target_logits, draft_token_ids, starts, bonus_token_ids, output)
        return output

    return verify
