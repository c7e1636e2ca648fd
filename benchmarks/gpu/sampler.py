"""Compares the cost of coupled sampling on a GPU with vLLM's own sampler, in one process.

    python -m benchmarks.gpu.sampler            # 256 requests x (16 drafts + 1) x 151,936 tokens; a GPU of 40 GB
    python -m benchmarks.gpu.sampler --dry      # toy sizes on the CPU; figures mean nothing

It samples the same logits in three ways: coupled (one kernel for all of them), vLLM with one seed per request, and vLLM
without seeds. vLLM's functions are called as its RejectionSampler calls them: `rejection_sample` on the drafted
positions, and the random sampler on the positions after them. Figures are medians of calls that take turns. Before, the
CPU and the GPU sample the same logits by coupled sampling, and must agree.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TypeAlias, cast

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from benchmarks.tables import table
from benchmarks.turns import by_turns, medians
from histospec.client.vllm.coupled import noise

Chooser: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from logits, the row of each, seeds, and the two numbers of the place to tokens."""


@dataclass(frozen=True)
class Shape:
    """Of a step."""

    batch: int
    drafted: int
    vocabulary: int

    @property
    def rows(self) -> int:
        """Sampled positions per request: the drafted ones and one after them."""
        return self.batch * (self.drafted + 1)


def main() -> int:
    """Prints the table. Returns 1 if the devices disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--drafted", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    if not arguments.dry and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry tries it on the CPU")
    shape = Shape(4, 3, 1000) if arguments.dry else Shape(arguments.batch, arguments.drafted, arguments.vocabulary)
    device = torch.device("cpu" if arguments.dry else "cuda")
    if arguments.dry:
        current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    logits = torch.randn(shape.rows, shape.vocabulary, device=device) * 3
    rows = torch.arange(shape.rows, device=device)
    where = torch.randint(2**31, (3, shape.rows), device=device)  # seeds, and two numbers of the place
    choose = noise.choose if arguments.dry else _kernel()
    few = min(shape.rows, 64)
    here = choose(logits, rows[:few], *where[:, :few]).cpu()
    there = noise.choose(logits[:few].cpu(), rows[:few].cpu(), *where[:, :few].cpu())
    alike = bool((here == there).all())
    print(f"{device.type} and CPU choose {'alike' if alike else 'DIFFERENTLY'} on {few} rows")
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "coupled": lambda: choose(logits, rows, *where),
        "vLLM, a seed a request": _vllm(logits, shape, seeded=True),
        "vLLM, no seeds": _vllm(logits, shape, seeded=False),
    }
    timed = {name: partial(_seconds, way, device) for name, way in ways.items()}
    took = by_turns(timed, 3 if arguments.dry else arguments.rounds + 3)
    read = shape.rows * shape.vocabulary * 4
    print(
        f"{shape.batch} requests, {shape.drafted} drafts each, {shape.vocabulary} tokens: {read / 1e9:.2f} GB of logits"
    )
    seconds = medians({name: each[3:] or each for name, each in took.items()})
    lines = [[name, f"{took * 1e3:.3f}", f"{read / took / 1e9:.0f}"] for name, took in seconds.items()]
    print(table(["sampler", "ms", "GB/s of logits"], lines), end="")
    return not alike


def _kernel() -> Chooser:
    from histospec.client.vllm.coupled import kernel

    return kernel.choose


def _vllm(logits: torch.Tensor, shape: Shape, seeded: bool) -> Callable[[], torch.Tensor]:
    """Returns vLLM's sampling of a step in which every request has a draft."""
    device = logits.device
    seeded_requests = range(shape.batch if seeded else 0)
    generators = {i: torch.Generator(device=device).manual_seed(i) for i in seeded_requests}
    sampler = TopKTopPSampler()
    drafts = torch.randint(shape.vocabulary, (shape.batch * shape.drafted,), dtype=torch.int32, device=device)
    counts = torch.arange(1, shape.batch + 1, dtype=torch.int32, device=device) * shape.drafted
    used = SimpleNamespace(
        all_greedy=False, all_random=True, generators=generators, temperature=torch.ones(shape.batch, device=device)
    )
    metadata = cast("SamplingMetadata", used)  # it reads only these attributes
    target, behind = logits.split([shape.batch * shape.drafted, shape.batch])

    def sample() -> torch.Tensor:
        tokens, _ = sampler(behind, generators, None, None)
        return rejection_sampler.rejection_sample(
            drafts,
            [shape.drafted] * shape.batch,
            shape.drafted,
            counts,
            None,
            target,
            tokens.view(-1, 1).int(),
            metadata,
        )

    return sample


def _seconds(way: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
