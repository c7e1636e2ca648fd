"""Measures rollouts of a learning policy with 100 million parameters, with and without drafts, epoch by epoch.

The policy is trained on the task of examples/tiny_rl, then by RL on rollouts without drafts. The policies of all epochs
are kept, and each method generates rollouts with all of them.
"""

import importlib.util
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.models import Scale
from benchmarks.gpu.results import Key, Results
from benchmarks.vllm import suffix as vllm_suffix
from examples import draft_server

if TYPE_CHECKING:
    from examples.tiny_rl.loop import Settings

NONE, TRAINING = "no drafts", "training"
METHODS: dict[str, tuple[dict[str, str], dict[str, Any] | None]] = {
    NONE: ({}, {}),
    "HistoSpec, learned cost": vllm_suffix.METHODS["HistoSpec, learned cost"],
    "suffix": vllm_suffix.METHODS["suffix, defaults"],
}


@dataclass(frozen=True)
class Plan:
    """The sizes of this part."""

    policy: tuple[int, ...] = (768, 2048, 16, 12)  # policy.Size: 113 million parameters
    rate: float = 3e-4
    """Highest learning rate of the warm start."""
    warm_start: int = 1000
    """Its steps."""
    problems: int = 128
    epochs: int = 5
    learning: float = 2e-5
    """Learning rate of the RL run."""
    minibatches: int = 16
    concurrencies: tuple[int, ...] = (32, 128, 256)
    device: str = "cuda"


DRY = Plan((64, 128, 2, 2), warm_start=20, problems=4, epochs=2, minibatches=2, concurrencies=(2, 4), device="cpu")
ON_GPU = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 8 << 30,
    "gpu_memory_utilization": 0.5,  # training needs the rest
}


def plan(scale: Scale) -> Plan:
    """The sizes of this part."""
    return DRY if scale.dry else Plan()


def jobs(scale: Scale) -> list[tuple[str, ...]]:
    """Returns the training, then method and concurrency of each process; the methods take turns."""
    return [(TRAINING,), *((method, str(n)) for n in reversed(plan(scale).concurrencies) for method in METHODS)]


def finished(job: tuple[str, ...], results: Results, scale: Scale) -> bool:
    """Returns whether the job is complete. The training is complete when no rollout needs its policies."""
    if job[0] == TRAINING:
        return all(finished(other, results, scale) for other in jobs(scale) if other != job)
    epochs = range(1, plan(scale).epochs + 1)
    return all(results.has(method=job[0], concurrency=int(job[1]), epoch=epoch) for epoch in epochs)


def run(job: tuple[str, ...], results: Results, scale: Scale, work: Path) -> None:
    """Trains, unless `work` has the policies already, or generates the rollouts of one method."""
    policies, size = work / "policies", plan(scale)
    if job[0] != TRAINING:
        _roll_out(job, results, size, policies, work)
    elif not (policies / "all").exists():
        _train(policies, size)
        (policies / "all").touch()


def _settings(size: Plan, concurrency: int) -> "Settings":
    from benchmarks.vllm import epochs

    run = epochs.settings(quick=False)
    return replace(run, concurrency=concurrency, epochs=size.epochs, problems=size.problems, rate=size.learning)


def _options(size: Plan) -> dict[str, Any]:
    return ON_GPU if size.device == "cuda" else {}


def _train(policies: Path, size: Plan) -> None:
    import torch
    from rich.console import Console

    from benchmarks.vllm import epochs
    from examples.tiny_rl import make_weights, policy

    torch.set_float32_matmul_precision("high")
    console = Console(stderr=True)
    model = make_weights.train(
        size.warm_start, 0, console, size=policy.Size(*size.policy), device=size.device, rate=size.rate
    )
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    widest = max(size.concurrencies)
    options = _options(size) | {"max_num_seqs": widest}
    epochs.train(policies, _settings(size, widest), model, options, size.minibatches)


def _roll_out(job: tuple[str, ...], results: Results, size: Plan, policies: Path, work: Path) -> None:
    from benchmarks.gpu.steps import say
    from benchmarks.vllm import epochs
    from examples.tiny_rl.rollout import DRAFTS

    method, concurrency = job[0], int(job[1])
    environment, options = METHODS[method]
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        say("suffix is left out: no arctic_inference here")
        for epoch in range(1, size.epochs + 1):
            key: Key = {"method": method, "concurrency": concurrency, "epoch": epoch}
            results.add(key, {"skipped": "no arctic_inference"})
        return
    with ExitStack() as stack:
        if options is None:
            server = stack.enter_context(draft_server.running(work / "store", work / "server.log"))
            os.environ |= environment | {
                "HISTOSPEC_ENDPOINT": server.endpoint,
                "HISTOSPEC_NAMESPACE": f"speedup {concurrency} {os.getpid()}",
            }
            options = DRAFTS
        rollouts = epochs.roll_out(policies, _settings(size, concurrency), _options(size) | options | {"seed": 1})
        for epoch, counts in enumerate(rollouts, 1):
            results.add({"method": method, "concurrency": concurrency, "epoch": epoch}, counts)
            say(f"{method}, {concurrency} at once, epoch {epoch}: {counts['seconds']:.2f} s")
