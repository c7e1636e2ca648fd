"""Takes the place of SGLang's compiled kernels, which PyPI has for CUDA alone: what NGRAM calls on a CPU, in torch.

Any other name can be imported, and raises when it is called.
"""

import os
import sys
import types
from typing import Any, NoReturn

import torch
from torch import Tensor

__version__ = "0.4.10"
ACCEPTS_ALL = os.environ.get("TESTBED_ACCEPTS_ALL") == "1"  # for the control that must fail


def _spans(rows: Tensor, starts: Tensor, ends: Tensor) -> Any:
    return zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, *_: Any
) -> None:
    """Writes the slots of new tokens, one request after the other, into the requests' rows."""
    at = 0
    for row, first, last in _spans(req_pool_indices, start, end):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, *_: Any
) -> Tensor:
    """Reads those slots back."""
    spans = [req_to_token[row, first:last] for row, first, last in _spans(req_pool_indices, start, end)]
    found = torch.cat(spans).to(out_cache_loc.dtype)
    out_cache_loc[: len(found)] = found
    return out_cache_loc


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows each request's tree as long as a child has the token that the model predicts."""
    predicted = target_predict.flatten().tolist()
    for number, tokens in enumerate(candidates.tolist()):
        places = retrive_index[number].tolist()
        children, siblings = retrive_next_token[number].tolist(), retrive_next_sibling[number].tolist()
        path = [places[0]]
        child = children[0]
        while child != -1 and len(path) < accept_index.shape[1]:
            if tokens[child] == predicted[path[-1]] or ACCEPTS_ALL:
                predicted[path[-1]] = tokens[child]
                path.append(places[child])
                child = children[child]
            else:
                child = siblings[child]
        accept_index[number, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[number] = len(path) - 1
        for place in path:
            predicts[place] = predicted[place]


verify_tree_greedy = verify_tree_greedy_cpu  # of 0.5.15


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    places: int,
) -> None:
    """Reads the trees of a batch from its mask: depth, first child and next sibling of each place."""
    mask = tree_mask.reshape(-1)[: batch_size * places * places].reshape(batch_size, places, places).bool()
    before = mask & torch.tril(torch.ones(places, places, dtype=torch.bool), -1)
    positions.view(-1)[: batch_size * places] = (before.sum(-1) + verified_seq_len[:batch_size, None]).reshape(-1)
    retrive_index.copy_(torch.arange(batch_size * places).view(batch_size, places))
    for number in range(batch_size):
        parents = [max((j for j in range(i) if before[number, i, j]), default=-1) for i in range(places)]
        for i in range(places):
            later = range(i + 1, places)
            retrive_next_token[number, i] = next((k for k in later if parents[k] == i), -1)
            same = (k for k in later if parents[i] >= 0 and parents[k] == parents[i])
            retrive_next_sibling[number, i] = next(same, -1)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Lists the slots of the accepted places."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """Picks each request's last accepted token."""
    bonus_tokens.copy_(accept_tokens[torch.arange(len(accept_lens)) * stride + accept_lens - 1])


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """SGLang calls it once when it starts; then it copies with torch (SGLANG_NATIVE_MOVE_KV_CACHE)."""
    if not torch.equal(targets, sources):
        raise NotImplementedError("the test bed copies with torch")


def _missing(name: str) -> Any:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"the test bed has no {name}")

    return call


class _Part(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"sgl_kernel.{name}")


for _name in (
    "elementwise", "flash_attn", "gemm", "kvcacheio", "mamba", "metal", "moe", "quantization", "scalar_type", "spatial",
    "speculative", "top_k", "utils",
):  # fmt: skip
    globals()[_name] = sys.modules[f"sgl_kernel.{_name}"] = _Part(f"sgl_kernel.{_name}")
# SGLang lists types of quantized weights at import.
sys.modules["sgl_kernel.scalar_type"].scalar_types = _Part("sgl_kernel.scalar_types")  # type: ignore[attr-defined]
sys.modules["sgl_kernel.speculative"].reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask  # type: ignore[attr-defined]
