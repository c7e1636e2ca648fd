"""What the Triton kernel of coupled sampling does, without a GPU; prints JSON.

    TRITON_INTERPRET=1 python coupled_kernel_check.py choices
    TRITON_INTERPRET=1 python coupled_kernel_check.py alternatives
    python coupled_kernel_check.py ptx

A process of its own: whether Triton interprets is decided when it is imported.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from histospec.client.vllm.coupled import kernel, noise
from histospec.client.vllm.coupled.alternatives import words
from histospec.protocol.alternatives import ABSENT, MOST


@triton.jit  # type: ignore[untyped-decorator]
def gumbels(words: Any, values: Any, size: tl.constexpr) -> None:
    at = tl.arange(0, size)
    tl.store(values + at, kernel._gumbel(tl.load(words + at).to(tl.uint32)))


def choices() -> dict[str, int]:
    torch.manual_seed(0)
    result = {"rows": 0, "alike": 0}
    for vocabulary in (1, 32, 300, 2500):
        logits = torch.randn(9, vocabulary) * 3
        logits[1, 1::3] = float("-inf")
        logits[2] = 0
        logits[3] = torch.randint(3, (vocabulary,))
        rows = torch.randint(9, (12,))
        seeds, pairs = torch.randint(-(2**63), 2**63 - 1, (2, 12))
        here, there = (each.choose(logits, rows, seeds, pairs, torch.arange(12)) for each in (noise, kernel))
        result["rows"] += len(rows)
        result["alike"] += int((here == there).sum())
    size = 4096
    words = torch.randint(2**32, (size,))
    words[:64], words[64:128] = torch.arange(64), 2**32 - 1 - torch.arange(64)
    values = torch.empty(size)
    gumbels[(1,)](words, values, size=size, enable_fp_fusion=False)
    return result | {"noise": size, "alike noise": int((values == noise.gumbel(words)).sum())}


def alternatives() -> dict[str, int]:
    torch.manual_seed(0)
    result = {"rows": 0, "alike": 0, "some": 0}
    for vocabulary in (1, 3, 32, 300, 2500, 5000):
        logits = torch.randn(9, vocabulary) * 3
        logits[1, 1::3] = float("-inf")
        logits[2, ::256] += 9  # the most probable tokens of one lane
        logits[3] = 100 * torch.rand(vocabulary)
        rows = torch.randint(9, (12,))
        seeds, pairs = torch.randint(-(2**63), 2**63 - 1, (2, 12))
        here, there = (each.weigh(logits, rows, seeds, pairs, torch.arange(12)) for each in (noise, kernel))
        one, other = words(here), words(there)
        given = one[:, 1:] != ABSENT
        same = (one[:, 1:] >> 8 == other[:, 1:] >> 8).all(1) & (here.tokens == there.tokens)
        # Sums of floats in another order may round to the next level.
        near = (((one & 255) - (other & 255)).abs() <= 1)[:, 1:].logical_or(~given).all(1)
        near &= (one[:, 0] - other[:, 0]).abs() <= 1
        result["rows"] += len(rows)
        result["alike"] += int((same & near).sum())
        result["some"] += int(given.any(1).sum())
    return result


def ptx(likely: int = 0) -> Counter[str]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        "logits": "*fp32", "stride": "i32", "rows": "*i64", "seeds": "*i64", "pairs": "*i64", "times": "*i64",
        "best": "*fp32", "token": "*i64", "top": "*fp32", "which": "*i64", "most_of": "*fp32", "total": "*fp32",
        "vocabulary": "i32", "tiles": "i32", "splits": "i32", "quarter": "constexpr", "likely": "constexpr",
    }  # fmt: skip
    constants = {"quarter": noise.QUARTER, "likely": likely}
    source = ASTSource(fn=kernel._choose, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    kinds = Counter(re.findall(r"\b((?:add|sub|mul|fma)(?:\.[a-z]+)*)\.f32\b", text))
    return Counter({"fma" if kind.startswith("fma") else kind: count for kind, count in kinds.items()})


def weighing_ptx() -> Counter[str]:
    return ptx(MOST + 1)


CHECKS: tuple[Callable[[], Any], ...] = (choices, alternatives, ptx, weighing_ptx)

if __name__ == "__main__":
    sys.stdout.write(json.dumps({each.__name__: each for each in CHECKS}[sys.argv[1]]()))
