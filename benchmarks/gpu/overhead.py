"""Measures the overhead of drafters: milliseconds per step, and how many of these pass inside the drafter's calls."""

import importlib
import importlib.util
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.models import Scale
from benchmarks.gpu.results import Key, Results
from benchmarks.vllm.calls import Stopwatch, in_histospec
from benchmarks.vllm.suffix import suffix
from examples import draft_server

if TYPE_CHECKING:
    from benchmarks.gpu.steps import Stepper

LETTERS = 64  # how many different tokens the model generates
GROUP = 8  # responses per problem
WINDOWS = 10
NONE = "none"


@dataclass(frozen=True)
class Method:
    """A method to draft, or none."""

    options: Callable[[], dict[str, Any]] = dict
    """vLLM's arguments."""
    cost: str = ""
    """HISTOSPEC_VERIFY_COST, if HistoSpec drafts."""
    calls: tuple[str, str, str] = ("", "", "")
    """Module, class and method that is timed; empty: what HistoSpec's scheduler calls, if it drafts."""
    needs: str = field(default="vllm")
    """A package."""
    runner: str = ""
    """vLLM's model runner, V1 or V2; empty: vLLM chooses."""
    asynchronous: bool | None = None
    """vLLM's asynchronous scheduling; None: vLLM chooses."""

    def missing(self) -> str:
        """Returns the package that the method lacks here; empty: none."""
        if importlib.util.find_spec(self.needs) is None:
            return self.needs
        triton = importlib.import_module("vllm.triton_utils").HAS_TRITON  # also without a backend for this machine
        return "triton" if self.runner == "V2" and not triton else ""

    def ignored(self, settings: dict[str, Any]) -> str:
        """Returns what vLLM does otherwise than the method asks, by the settings of its engine; empty: nothing."""
        if self.runner not in ("", settings["model_runner"]):
            return f"vLLM chose model runner {settings['model_runner']}"
        if self.asynchronous and not settings["async_scheduling"]:
            return "vLLM turned asynchronous scheduling off"
        return ""


def _histospec() -> dict[str, Any]:
    from examples.tiny_rl.rollout import DRAFTS

    return DRAFTS


def _ngram() -> dict[str, Any]:
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": 16, **lookup}}


def _synchronous(runner: str = "") -> dict[str, Method]:
    """Returns the methods that are compared with one of vLLM's model runners, without asynchronous scheduling."""
    methods = {
        "none, not async": Method(asynchronous=False, runner=runner),
        "HistoSpec, cost 1": Method(_histospec, cost="1", runner=runner),  # asks for no drafts
        "HistoSpec, cost 0.05": Method(_histospec, cost="0.05", runner=runner),
    }
    return {f"{name}, {runner}" if runner else name: method for name, method in methods.items()}


def _asynchronous(cost: str) -> Method:
    """Returns HistoSpec under asynchronous scheduling. A step's wait for the tokens of the one before is timed, too."""
    asking = ("histospec.client.vllm.asynchronous.asking", "Asking", "step")
    return Method(_histospec, cost=cost, calls=asking, runner="V2", asynchronous=True)


METHODS = {
    NONE: Method(),
    **_synchronous(),
    **_synchronous("V2"),
    **_synchronous("V1"),
    "HistoSpec, async, cost 1, V2": _asynchronous("1"),
    "HistoSpec, async, cost 0.05, V2": _asynchronous("0.05"),
    "suffix": Method(
        suffix,
        calls=("vllm.v1.spec_decode.suffix_decoding", "SuffixDecodingProposer", "propose"),
        needs="arctic_inference",
    ),
    "ngram": Method(_ngram, calls=("vllm.v1.spec_decode.ngram_proposer", "NgramProposer", "propose")),
}


def jobs(scale: Scale) -> list[tuple[str, ...]]:
    """Returns the method of each process; all use the smallest model, with which a millisecond matters most."""
    return [(method,) for method in METHODS]


def finished(job: tuple[str, ...], results: Results, scale: Scale) -> bool:
    """Returns whether the job is complete."""
    return all(results.has(method=job[0], batch=batch) for batch in scale.batches)


def run(job: tuple[str, ...], results: Results, scale: Scale, work: Path) -> None:
    """Measures one method at each batch, on the second visit of problems whose first visit is the history."""
    from benchmarks.gpu.steps import Stepper, say
    from examples.tiny_rl.rollout import as_prompt
    from histospec.client.vllm.patches import cpu

    method = METHODS[job[0]]
    model, shape = next(iter(scale.shapes.items()))
    if missing := method.missing():
        say(f"{job[0]} is left out: no {missing} here")
        for batch in scale.batches:
            results.add({"method": job[0], "batch": batch}, {"skipped": f"no {missing}"})
        return
    if method.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"V1": "0", "V2": "1"}[method.runner]
    cpu.install()  # without it, vLLM's CPU build rejects drafts at random
    folder = gpu_models.write(work / f"{model} with {LETTERS} letters", shape, LETTERS)
    with ExitStack() as stack:
        if method.cost:
            server = stack.enter_context(draft_server.running(work / "store", work / "server.log"))
            os.environ |= {
                "HISTOSPEC_ENDPOINT": server.endpoint,
                "HISTOSPEC_NAMESPACE": f"overhead {os.getpid()}",
                "HISTOSPEC_VERIFY_COST": method.cost,
            }
        scheduling = {} if method.asynchronous is None else {"async_scheduling": method.asynchronous}
        options = scale.engine | method.options() | scheduling
        stepper = Stepper(folder, scale.overhead_context, scale.overhead_room, max(scale.batches), options)
        ours = _timed(method)  # after the engine, because vLLM on a CPU fails in numba if its drafter is imported first
        fitting = [batch for batch in scale.batches if batch <= stepper.fitting]
        problems = prompts(fitting[-1], scale.overhead_context)
        sampling = stepper.sampling(1, scale.history)
        stepper.llm.generate([as_prompt(p) for p in problems], sampling, use_tqdm=False)
        for batch in scale.batches:
            key: Key = {"method": job[0], "batch": batch}
            settings = stepper.settings() | {"model": model, "context": scale.overhead_context}
            if ignored := method.ignored(settings):
                results.add(key, settings | {"skipped": ignored})
            elif batch not in fitting:
                results.add(key, settings | {"skipped": f"KV cache for {stepper.fitting} sequences"})
            elif not results.has(**key):
                results.add(key, settings | _measured(stepper, problems[:batch], scale.steps, ours))
                say(f"{job[0]}, batch {batch}: {1e3 * results.rows[-1]['seconds']:.2f} ms a step")
        stepper.llm.llm_engine.engine_core.shutdown()


def _timed(method: Method) -> Stopwatch:
    module, owner, name = method.calls
    if module:
        return Stopwatch(getattr(importlib.import_module(module), owner), (name,))
    return in_histospec() if method.cost else Stopwatch()


def prompts(batch: int, length: int, group: int = GROUP) -> list[list[int]]:
    """Returns prompts of the model's letters, in groups of equal ones."""
    return [Random(i // group).choices(range(LETTERS), k=length) for i in range(batch)]


def _measured(stepper: "Stepper", prompts: list[list[int]], steps: int, ours: Stopwatch) -> dict[str, float]:
    """Returns medians over the windows."""
    stepper.start(prompts, epoch=2)
    stepper.window(2 * steps)
    windows, inside = [], []
    for _ in range(WINDOWS):
        ours.seconds = 0.0
        windows.append(stepper.window(steps))
        inside.append(ours.seconds / windows[-1].counts.engine_steps)
    stepper.stop()
    return {
        "seconds": statistics.median(window.step for window in windows),
        "inside": statistics.median(inside),
        "drafted": statistics.mean(window.drafted for window in windows),
        "gained": statistics.mean(window.gained for window in windows),
    }
