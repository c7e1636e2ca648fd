"""What the Triton kernel of coupled sampling does, without a GPU; prints JSON.

    TRITON_INTERPRET=1 python coupled_kernel_check.py choices
    python coupled_kernel_check.py ptx

A process of its own: whether Triton interprets is decided when it is imported.
"""

import json
import re
import sys
from collections import Counter
from typing import Any

import torch
import triton
import triton.language as tl

from histospec.client.vllm.coupled import kernel, noise


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


def ptx() -> Counter[str]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        "logits": "*fp32", "stride": "i32", "rows": "*i64", "seeds": "*i64", "pairs": "*i64", "times": "*i64",
        "best": "*fp32", "token": "*i64", "vocabulary": "i32", "tiles": "i32", "splits": "i32", "quarter": "constexpr",
    }  # fmt: skip
    source = ASTSource(fn=kernel._choose, signature=signature, constexprs={"quarter": noise.QUARTER})
    options = {"enable_fp_fusion": False}
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    kinds = Counter(re.findall(r"\b((?:add|sub|mul|fma)(?:\.[a-z]+)*)\.f32\b", text))
    return Counter({"fma" if kind.startswith("fma") else kind: count for kind, count in kinds.items()})


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"choices": choices, "ptx": ptx}[sys.argv[1]]()))
