"""Measures the time of a step by batch and drafted tokens per sequence, and so the verify_cost of a GPU."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.models import Scale
from benchmarks.gpu.results import Key, Results
from benchmarks.turns import medians

if TYPE_CHECKING:
    from benchmarks.gpu.steps import Stepper

LENGTHS = (0, 1, 2, 4, 8, 16)
SETTLE = 2  # untimed steps after a change, because the first still verifies drafts of the previous length
PLAIN, DRAFTS, CAPTURED = "plain", "drafts", "drafts, all graphs"
ENGINES = (PLAIN, DRAFTS, "plain, not async", CAPTURED)
"""Without speculation: vLLM's defaults, and without async scheduling. With drafts: vLLM's defaults, and a CUDA graph
for each measured number of tokens."""


def verify_cost(seconds: Mapping[int, float], plain: float) -> dict[int, float]:
    """Returns the cost of a drafted token, in plain steps, by the length of the drafts.

    Args:
        seconds: duration of a step by drafted tokens per sequence, including 0.
        plain: duration of a step without speculation.
    """
    return {k: (took - seconds[0]) / (k * plain) for k, took in sorted(seconds.items()) if k}


def marginal_cost(seconds: Mapping[int, float], plain: float) -> dict[int, float]:
    """Returns the same for the tokens by which each length exceeds the next shorter one: the marginal cost."""
    return {k: (seconds[k] - seconds[less]) / ((k - less) * plain) for less, k in pairwise(sorted(seconds))}


def jobs(scale: Scale) -> list[tuple[str, ...]]:
    """Returns model and engine of each process, the most informative first."""
    return [(model, engine) for engine in ENGINES for model in scale.shapes if not (scale.dry and engine == CAPTURED)]


def finished(job: tuple[str, ...], results: Results, scale: Scale) -> bool:
    """Returns whether the job is complete."""
    model, engine = job
    return all(results.has(model=model, engine=engine, batch=batch) for batch in scale.batches)


def run(job: tuple[str, ...], results: Results, scale: Scale, work: Path) -> None:
    """Measures one engine at each batch."""
    from benchmarks.gpu.steps import Stepper, say

    model, engine = job
    shape = scale.shapes[model]
    folder = gpu_models.write(work / f"{model} without weights", shape)
    options = scale.engine | {"load_format": "dummy"} | _options(engine, scale.batches)
    stepper = Stepper(folder, scale.context, scale.room, max(scale.batches), options)
    for batch in scale.batches:
        key: Key = {"model": model, "engine": engine, "batch": batch}
        if results.has(**key):
            continue
        settings = stepper.settings() | {"context": scale.context}
        if batch > stepper.fitting:
            say(f"{model}, {engine}: {batch} contexts of {scale.context} do not fit, only {stepper.fitting}")
            results.add(key, settings | {"skipped": f"KV cache for {stepper.fitting} sequences"})
            continue
        stepper.start(_prompts(batch, scale.context, shape.vocabulary))
        windows = _curve(stepper, (0,) if engine.startswith(PLAIN) else LENGTHS, scale, Random(batch))
        stepper.stop()
        seconds = medians(windows)
        results.add(key, settings | {"seconds": seconds, "windows": windows})
        say(f"{model}, {engine}, batch {batch}: " + ", ".join(f"{k}: {1e3 * s:.2f} ms" for k, s in seconds.items()))


def _options(engine: str, batches: Sequence[int]) -> dict[str, Any]:
    from benchmarks.gpu.drafts import OPTIONS

    if engine == PLAIN:
        return {}
    if engine.startswith(PLAIN):
        return {"async_scheduling": False}
    if engine == DRAFTS:
        return OPTIONS
    sizes = sorted({batch * (k + 1) for batch in batches for k in LENGTHS})
    return OPTIONS | {"compilation_config": {"cudagraph_capture_sizes": sizes}}


def _prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """Returns different prompts; a larger batch begins with the prompts of a smaller one."""
    return [Random(i).choices(range(vocabulary), k=length) for i in range(batch)]


def _curve(stepper: "Stepper", lengths: Sequence[int], scale: Scale, rng: Random) -> dict[int, list[float]]:
    """Returns the seconds per step of each window, by length. The lengths take turns, in another order each time."""
    from benchmarks.gpu.drafts import FixedLengthDrafter

    seconds: dict[int, list[float]] = {k: [] for k in lengths}
    for number in range(scale.windows + 1):
        for k in rng.sample(lengths, len(lengths)):
            FixedLengthDrafter.length = k
            stepper.window(SETTLE)
            window = stepper.window(scale.steps)
            if window.drafted != k:
                raise RuntimeError(f"{window.drafted:.2f} drafted tokens a sequence were verified, not {k}")
            if number:  # the first one warms up
                seconds[k].append(window.step)
    FixedLengthDrafter.length = 0  # no drafts while vLLM reads the next prompts
    return seconds
