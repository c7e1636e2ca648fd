"""A plug-in of SGLang that lets NGRAM run on a CPU: there, SGLang's torch attention verifies nothing."""

import functools
import importlib
import inspect
import sys
from typing import Any

import numpy as np
import torch

CUDA_ALONE = "only supports CUDA device"


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
    arguments: Any = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    if CUDA_ALONE in inspect.getsource(arguments._handle_ngram):
        arguments._handle_ngram = on_cuda(arguments._handle_ngram)
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    worker: Any = importlib.import_module("sglang.srt.speculative.ngram_worker")
    worker.NgramCorpus = NoNgrams
    if "cuda" in inspect.getsource(worker.NGRAMWorker.__init__):
        worker.NGRAMWorker.device = property(lambda _: "cpu", lambda *_: None)
        for name in ("triton_ops.cache_locs", "eagle_utils"):  # kernels in Triton, which is interpreted
            importlib.import_module(f"sglang.srt.speculative.{name}")._is_cuda = True  # type: ignore[attr-defined]
    attention: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend = attention.TorchNativeAttnBackend
    backend.forward_extend = verifying(backend.forward_extend, attention)


def on_cuda(handle: Any) -> Any:
    """Returns a function that lets `handle` see arguments for CUDA: SGLang 0.5.15 refuses NGRAM elsewhere."""

    @functools.wraps(handle)
    def handle_there(server_args: Any) -> None:
        device, server_args.device = server_args.device, "cuda"
        try:
            handle(server_args)
        finally:
            server_args.device = device

    return handle_there


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
        module.scaled_dot_product_attention = masked(attend, trees(batch.spec_info.custom_mask, kept[0], places))
        try:
            return forward(self, q, k, v, layer, batch, *args, **kwargs)
        finally:
            batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = kept
            module.scaled_dot_product_attention = attend

    return extend


def trees(mask: torch.Tensor, lengths: torch.Tensor, places: int) -> list[torch.Tensor]:
    """Returns the mask of each request's places; 0.5.15 also has columns for the text before them."""
    before = torch.zeros_like(lengths) if mask.numel() == len(lengths) * places**2 else lengths
    parts = mask.split((places * (before + places)).tolist())
    return [part.view(places, -1)[:, -places:].bool() for part in parts]


def masked(attend: Any, trees: list[torch.Tensor]) -> Any:
    """Returns the attention of one request after the other, with these masks of their last places."""
    requests = iter(trees)

    def attention(query: torch.Tensor, *args: Any, attn_mask: None, is_causal: bool, **kwargs: Any) -> torch.Tensor:
        length, tree = query.shape[-2], next(requests)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[-len(tree) :, -len(tree) :] = tree
        attended: torch.Tensor = attend(query, *args, attn_mask=mask, **kwargs)
        return attended

    return attention
