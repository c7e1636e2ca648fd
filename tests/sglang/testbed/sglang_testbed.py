"""A plug-in of SGLang that lets NGRAM run on a CPU: there, SGLang's torch attention verifies nothing."""

import functools
import importlib
import sys
from typing import Any

import numpy as np
import torch


class NoNgrams:
    """Takes the place of NgramCorpus. It knows nothing: all places behind the last token have the token 0."""

    def __init__(self, *_: Any, draft_token_num: int, **__: Any) -> None:
        self._places = draft_token_num

    def batch_get(self, req_ids: list[str], batch_tokens: list[list[int]], total_lens: list[int]) -> Any:
        tokens = np.zeros((len(req_ids), self._places), np.int64)
        tokens[:, 0] = [tokens[-1] for tokens in batch_tokens]
        mask = np.tile(np.tri(self._places, dtype=np.int64), (len(req_ids), 1, 1))
        return tokens.reshape(-1), mask.reshape(-1)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def register() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    worker: Any = importlib.import_module("sglang.srt.speculative.ngram_worker")
    worker.NgramCorpus = NoNgrams
    attention: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = attention.TorchNativeAttnBackend
    backend.forward_extend = verifying(backend.forward_extend, attention)


def verifying(forward: Any, module: Any) -> Any:
    """Returns `forward_extend` that also verifies: the places of a request extend its text, as their mask says."""

    @functools.wraps(forward)
    def extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_target_verify():
            return forward(self, q, k, v, layer, batch, *args, **kwargs)
        places = batch.spec_info.draft_token_num
        kept = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
        batch.extend_prefix_lens, batch.extend_seq_lens = kept[0], torch.full_like(kept[0], places)
        batch.seq_lens = kept[0] + places
        attend = module.scaled_dot_product_attention
        module.scaled_dot_product_attention = masked(attend, batch.spec_info.custom_mask.view(-1, places, places))
        try:
            return forward(self, q, k, v, layer, batch, *args, **kwargs)
        finally:
            batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = kept
            module.scaled_dot_product_attention = attend

    return extend


def masked(attend: Any, trees: torch.Tensor) -> Any:
    """Returns the attention of one request after the other, with these masks of their last places."""
    requests = iter(trees.bool())

    def attention(query: torch.Tensor, *args: Any, attn_mask: None, is_causal: bool, **kwargs: Any) -> torch.Tensor:
        length, tree = query.shape[-2], next(requests)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[-len(tree) :, -len(tree) :] = tree
        attended: torch.Tensor = attend(query, *args, attn_mask=mask, **kwargs)
        return attended

    return attention
