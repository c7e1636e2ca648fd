"""Corrects rejection sampling in vLLM's CPU build.

`expand_batch_to_tokens` repeats each request's temperature, top-k and top-p for each drafted token. vLLM's CPU version
writes the result into a temporary copy and returns uninitialised memory. With any speculative method at a temperature
above 0, vLLM then divides the logits by arbitrary numbers (vllm-project/vllm issue 55005). GPU builds are right and
stay unchanged.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from histospec.client.vllm.patches.replacing import is_replaced, replace

if TYPE_CHECKING:  # type checkers would take minutes for torch and vLLM
    torch: Any
    Tensor = Any
else:
    import torch
    from torch import Tensor

logger = logging.getLogger("histospec.vllm")


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeats x[i] for each token of request i: [a, b, c] with cumulative counts [2, 5, 6] gives [a, a, b, b, b, c].

    Args:
        x: [batch_size], any dtype.
        cu_num_tokens: [batch_size], integers: tokens up to and including each request.
        num_tokens: cu_num_tokens[-1].
        replace_from: a value of x that becomes replace_to.
        replace_to: the value put in its place.
    """
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(x, counts.long(), output_size=num_tokens)


def install() -> None:
    """Replaces vLLM's function if this process runs on the CPU platform; at most once."""
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        return
    rejection_sampler: Any = importlib.import_module("vllm.v1.sample.rejection_sampler")
    if not callable(getattr(rejection_sampler, "expand_batch_to_tokens", None)):
        logger.warning("HistoSpec: this vLLM has no expand_batch_to_tokens; its CPU sampling stays unchanged")
    elif not is_replaced(rejection_sampler, "expand_batch_to_tokens"):
        replace(rejection_sampler, "expand_batch_to_tokens", expand_batch_to_tokens)
        logger.info("HistoSpec replaces vLLM's expand_batch_to_tokens on the CPU, which returns uninitialised memory")
