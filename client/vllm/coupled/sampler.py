"""Coupled sampling inside vLLM: what its model runner samples with, exchanged after all of its own processing.

A token of a request with a seed is argmax(log p + noise(seed, place)), p being what vLLM would have sampled from:
after temperature, top-k, top-p, min-p, penalties, bias and grammar. A drafted token is accepted while it is that token.
Requests without a seed, and greedy ones, take vLLM's own way. Three places are exchanged:

- GPUModelRunner._sample: remembers, while it samples, which seeds and places (places.py) the rows of the batch have;
- TopKTopPSampler.forward, of its sampler: draws the token behind every draft, and where there are no drafts;
- rejection_sampler.rejection_sample: decides on drafted tokens.

Which vLLM these fit is checked when they are exchanged; another one is refused, for silently independent draws would
look like coupled ones that do not repeat.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from . import noise
from .places import Texts

if TYPE_CHECKING:
    torch: Any
    Tensor = Any
else:
    import torch
    from torch import Tensor

logger = logging.getLogger("vllm.histospec")

REJECTED = -1  # what vLLM puts where there is no token
VERIFYING = [
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits",
    "bonus_token_ids", "sampling_metadata",
]  # fmt: skip

_step: "Step | None" = None  # what is being sampled; a worker samples in one thread


class Step:
    """The coupled rows of a batch that is being sampled."""

    def __init__(self, batch: Any, drafted: Sequence[int] | None, texts: Texts) -> None:
        """Takes vLLM's InputBatch, how many tokens were drafted for each of its rows, and the texts of its requests."""
        generators: Mapping[int, Any] = batch.generators
        self.rows = sorted(generators)
        self._seeds = [_signed(generators[row].initial_seed()) for row in self.rows]
        self._drafted = [drafted[row] if drafted else 0 for row in self.rows]
        self._places = texts.places(
            (batch.req_ids[row], batch.token_ids_cpu[row], int(batch.num_tokens_no_spec[row]), count)
            for row, count in zip(self.rows, self._drafted, strict=True)
        )

    def choose(self, logits: Tensor) -> Tensor:
        """The tokens int64[rows] behind the drafts; logits are float32[batch, V], one row a request."""
        pairs, times = ([numbers[-1] for numbers in each] for each in zip(*self._places, strict=True))
        return _choose(logits, self.rows, self._seeds, pairs, times)

    def verify(self, logits: Tensor, drafts: Tensor, starts: Sequence[int], behind: Tensor, output: Tensor) -> None:
        """Writes what becomes of the drafts of the coupled rows.

        Args:
            logits: float32[drafted, V], flat over the requests.
            drafts: int[drafted], the tokens.
            starts: where each request's drafts begin.
            behind: int[batch, 1], the token behind each draft.
            output: int[batch, longest + 1], overwritten in the coupled rows: the tokens up to the first that differs
                from its draft, or up to the one behind the draft; then REJECTED.
        """
        drawn = [(i, j) for i, drafted in enumerate(self._drafted) for j in range(drafted)]
        flat = [starts[self.rows[i]] + j for i, j in drawn]
        device = output.device
        pairs, times = ([self._places[i][what][j] for i, j in drawn] for what in (0, 1))
        chosen = _choose(logits, flat, [self._seeds[i] for i, _ in drawn], pairs, times)
        rows, within = torch.tensor(drawn, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        counts = torch.tensor(self._drafted, device=device)
        coupled = torch.tensor(self.rows, device=device)
        tokens = output.new_full((len(self.rows), output.shape[1]), REJECTED)
        tokens[rows, within] = chosen.to(output.dtype)
        tokens[torch.arange(len(self.rows), device=device), counts] = behind[coupled, 0].to(output.dtype)
        differs = chosen != drafts[torch.tensor(flat, dtype=torch.int64, device=device)]
        first = counts.scatter_reduce(0, rows, torch.where(differs, within, counts[rows]), "amin")
        kept = torch.arange(output.shape[1], device=device) <= first[:, None]
        output[coupled] = torch.where(kept, tokens, REJECTED)


def _signed(seed: int) -> int:
    """The same 64 bits as torch's int64."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _choose(logits: Tensor, *numbers: Sequence[int]) -> Tensor:
    arguments = torch.tensor(numbers, dtype=torch.int64).to(logits.device, non_blocking=True)
    implementation: Any = noise
    if logits.is_cuda:
        implementation = importlib.import_module(".kernel", __package__)
    chosen: Tensor = implementation.choose(logits, *arguments.unbind())
    return chosen


def install() -> None:
    """Makes every V1 model runner of this process sample so; once. Raises RuntimeError where this vLLM does not fit."""
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    rejection: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    if hasattr(runner._sample, "__wrapped__"):
        return
    _require(runner._sample, ["self", "logits", "spec_decode_metadata"])
    _require(rejection.rejection_sample, VERIFYING)
    runner._sample = _remembering(runner._sample)
    rejection.rejection_sample = _verifying(rejection.rejection_sample)
    logger.info("HistoSpec samples requests that have a seed with noise of that seed and of their text")


def _require(function: Callable[..., Any], first: list[str]) -> None:
    found = list(inspect.signature(function).parameters)
    if found[: len(first)] != first:
        raise RuntimeError(
            f"HISTOSPEC_SAMPLING=coupled does not fit this vLLM: {function.__qualname__} takes {', '.join(found)}, "
            f"but {', '.join(first)} is known. Leave it unset to sample as vLLM does."
        )


def _remembering(sample: Callable[..., Any]) -> Callable[..., Any]:
    """GPUModelRunner._sample, with the step at hand where others find it."""

    @functools.wraps(sample)
    def remember(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        global _step
        batch = self.input_batch
        if not batch.generators:
            return sample(self, logits, spec_decode_metadata)
        if self.use_async_scheduling:
            raise RuntimeError(
                "HISTOSPEC_SAMPLING=coupled needs async_scheduling=False (--no-async-scheduling): the noise of a token "
                "depends on the one before it, which the scheduler does not know yet. With drafts vLLM never does that."
            )
        _exchange(self.sampler.topk_topp_sampler)
        texts = self.__dict__.setdefault("_histospec_texts", Texts())
        drafted = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        _step = Step(batch, drafted, texts)
        try:
            return sample(self, logits, spec_decode_metadata)
        finally:
            _step = None

    return remember


def _exchange(sampler: Any) -> None:
    """Lets a TopKTopPSampler, which chooses its forward when it is made, draw the coupled rows otherwise; once."""
    if hasattr(sampler.forward, "__wrapped__"):
        return
    _require(sampler.forward, ["logits", "generators", "k", "p"])
    filtered: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
    forward = sampler.forward

    @functools.wraps(forward)
    def draw(logits: Any, generators: Any, k: Any, p: Any) -> Any:
        step = _step
        if step is None:
            return forward(logits, generators, k, p)
        logits = filtered(logits, k, p)
        chosen = step.choose(logits)
        if len(step.rows) == len(logits) and not str(sampler.logprobs_mode).startswith("processed"):
            return chosen, None
        tokens, processed = forward(logits, {}, None, None)
        tokens[step.rows] = chosen.to(tokens.dtype)
        return tokens, processed

    sampler.forward = draw


def _verifying(rejection_sample: Callable[..., Any]) -> Callable[..., Any]:
    """rejection_sample, which decides on the coupled rows itself."""

    @functools.wraps(rejection_sample)
    def verify(
        draft_token_ids: Any, num_draft_tokens: Any, max_spec_len: Any, cu_num_draft_tokens: Any, draft_probs: Any,
        target_logits: Any, bonus_token_ids: Any, sampling_metadata: Any, *rest: Any, **named: Any,
    ) -> Any:  # fmt: skip
        step = _step
        if step is None or len(step.rows) < len(num_draft_tokens):
            output = rejection_sample(
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                bonus_token_ids, sampling_metadata, *rest, **named,
            )  # fmt: skip
        else:
            output = bonus_token_ids.new_empty((len(num_draft_tokens), max_spec_len + 1), dtype=torch.int32)
        if step is not None:
            starts = list(accumulate(num_draft_tokens, initial=0))
            step.verify(target_logits, draft_token_ids, starts, bonus_token_ids, output)
        return output

    return verify
