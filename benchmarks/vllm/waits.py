"""Measures how long a GPU waits for vLLM's scheduler between two steps, with HistoSpec and without drafts.

    python -m benchmarks.vllm.waits               # needs vllm; six minutes on two cores, which nothing else may use
    python -m benchmarks.vllm.waits --shards 1 2  # twice as long; two shards share a Redis
    python -m benchmarks.vllm.waits --quick       # to check that it runs; the figures mean nothing

A toy model computes on the CPU, then the step sleeps until the time that a GPU would take is over. The GPU waits from
the sampled tokens of a step until the next step begins. An engine without drafts and one with HistoSpec take turns.
Parts of the wait with HistoSpec:

    HistoSpec's   in HistoSpec's methods, without vLLM's methods that they call; the rest of the difference is vLLM's
                  own work with drafts and with more tokens, which any drafter makes
    its CPU       of this the CPU time, without the wait for the rest of the round trip
    send          until the sampled tokens have left; this and `receive` are parts of HistoSpec's time
    hidden        vLLM's bookkeeping while the drafts are on their way
    receive       the wait for the rest of the round trip, and reading the drafts
    prepare       what HistoSpec does while the model computes: no part of the wait

The last lines have the costs for benchmarks/scale/model.py: straight lines through HistoSpec's CPU time and `hidden`,
and what each further message of a step adds.
"""

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import models
from benchmarks.gpu.overhead import LETTERS, prompts
from benchmarks.scale.measure import service
from benchmarks.scale.model import Plan
from benchmarks.tables import heading, line

if TYPE_CHECKING:
    from benchmarks.gpu.steps import Window

GROUP = 16  # responses per problem
CONTEXT, ROOM, HISTORY = 64, 1024, 256  # tokens of a prompt, of a response at most, of each response in the history
WARM_STEPS = 20
HEAD = (
    "shards", "requests", "step", "without drafts", "with HistoSpec", "more", "HistoSpec's", "its CPU", "send",
    "hidden", "receive", "prepare", "tokens per step",
)  # fmt: skip
BETWEEN = ("update_from_output", "update_draft_token_ids", "schedule")
"""vLLM's methods of a scheduler between two steps, which HistoSpec's extend."""
Result = TypeVar("Result")


@dataclass
class Recorder:
    """The times of steps in milliseconds, of one engine: between two steps, and of HistoSpec's calls there."""

    between: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    send: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    receive: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    _sampled: float = math.inf
    _left: float = 0.0
    _own: float = 0.0
    _cpu: float = 0.0

    def clear(self) -> None:
        """Forgets all steps."""
        for times in (self.between, self.own, self.cpu, self.send, self.hidden, self.receive, self.prepare):
            times.clear()
        self._sampled = math.inf

    def watch(self, executor: Any, seconds: float) -> None:
        """Times the pauses of this executor, and makes its part of a step take at least so long."""
        execute, sample = executor.execute_model, executor.sample_tokens
        started = 0.0

        def executing(*args: Any, **named: Any) -> Any:
            nonlocal started
            started = time.perf_counter()
            if math.isfinite(self._sampled):
                self.between.append(1e3 * (started - self._sampled))
                self.own.append(1e3 * self._own)
                self.cpu.append(1e3 * self._cpu)
            self._own = self._cpu = 0.0
            return execute(*args, **named)

        def sampling(*args: Any, **named: Any) -> Any:
            time.sleep(max(0.0, started + seconds - time.perf_counter()))
            result = sample(*args, **named)
            self._sampled = time.perf_counter()
            return result

        executor.execute_model, executor.sample_tokens = executing, sampling

    def watch_calls(self, scheduler: Any) -> None:
        """Times the adapter's methods, and its calls to the client."""
        for name in BETWEEN:
            setattr(scheduler, name, self._counted(getattr(scheduler, name), 1))
            of_vllm = next(vars(each)[name] for each in type(scheduler).__mro__ if each.__module__.startswith("vllm."))
            setattr(type(scheduler).__base__, name, self._counted(of_vllm, -1))
        prepare = scheduler.get_grammar_bitmask

        def preparing(*args: Any) -> Any:
            started = time.perf_counter()
            result = prepare(*args)
            self.prepare.append(1e3 * (time.perf_counter() - started))
            return result

        scheduler.get_grammar_bitmask = preparing
        sessions = scheduler._sessions
        sessions.ask = self._asking(sessions.ask)
        sessions.collect_tokens = self._collecting(sessions.collect_tokens)

    def _counted(self, method: Callable[..., Result], sign: int) -> Callable[..., Result]:
        """Adds the time of a method to HistoSpec's, or subtracts it."""

        def counted(*args: Any, **named: Any) -> Result:
            started, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **named)
            finally:
                self._own += sign * (time.perf_counter() - started)
                self._cpu += sign * (time.thread_time() - cpu)

        return counted

    def _asking(self, ask: Callable[..., Result]) -> Callable[..., Result]:
        def timed(*args: Any, **named: Any) -> Result:
            started = time.perf_counter()
            result = ask(*args, **named)
            if not self._left:  # the second call of a step sends what vLLM might have cut
                self._left = time.perf_counter()
                self.send.append(1e3 * (self._left - started))
            return result

        return timed

    def _collecting(self, collect: Callable[..., Result]) -> Callable[..., Result]:
        def timed(*args: Any) -> Result:
            started = time.perf_counter()
            result = collect(*args)
            self.hidden.append(1e3 * (started - self._left))
            self.receive.append(1e3 * (time.perf_counter() - started))
            self._left = 0.0
            return result

        return timed


class Engine:
    """An engine in this process whose steps take at least as long as on a GPU."""

    def __init__(self, folder: Path, batch: int, seconds: float, drafts: bool) -> None:
        from benchmarks.gpu.steps import Stepper
        from examples.tiny_rl.rollout import DRAFTS
        from histospec.client.vllm.choice.prices import StepClock

        self.recorder = Recorder()

        def watch(llm: Any) -> None:
            core = llm.llm_engine.engine_core.engine_core
            self.recorder.watch(core.model_executor, seconds)
            if drafts:
                self.recorder.watch_calls(core.scheduler)
                core.scheduler._clock = StepClock(computes_here=False)  # as with a GPU

        options = models.DRY.engine | {"kv_cache_memory_bytes": 256 << 20, "async_scheduling": False}
        options |= DRAFTS if drafts else {}
        self._stepper = Stepper(folder, CONTEXT, ROOM, batch, options, watch)

    def remember(self, prompts: list[list[int]]) -> None:
        """Generates the history."""
        from examples.tiny_rl.rollout import as_prompt

        sampling = self._stepper.sampling(1, HISTORY)
        self._stepper.llm.generate([as_prompt(prompt) for prompt in prompts], sampling, use_tqdm=False)

    def turn(self, prompts: list[list[int]], steps: int) -> "Window":
        """Steps full batches, which the recorder then has."""
        self._stepper.start(prompts, epoch=2)
        self._stepper.window(WARM_STEPS)
        self.recorder.clear()
        window = self._stepper.window(steps)
        self._stepper.stop()
        return window


def measured(folder: Path, batch: int, seconds: float, turns: int, steps: int) -> NDArray[np.float64]:
    """Returns a row of the table, from the second column on: medians of the turns."""
    problems = prompts(batch, CONTEXT, GROUP)
    plain, drafting = (Engine(folder, batch, seconds, drafts) for drafts in (False, True))
    drafting.remember(problems)
    found = []
    for _ in range(turns):
        plain.turn(problems, steps)
        window = drafting.turn(problems, steps)
        without = float(np.median(plain.recorder.between))
        times = drafting.recorder
        parts = (times.between, times.own, times.cpu, times.send, times.hidden, times.receive, times.prepare)
        between, *others = (float(np.median(part)) for part in parts)
        found.append([1e3 * window.step, without, between, between - without, *others, window.gained])
    middle: NDArray[np.float64] = np.median(np.array(found), axis=0)
    return middle


def main() -> None:
    """Prints the table: milliseconds, medians of the turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1], help="shards of the service (1)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256], help="requests at once (1 64 256)")
    parser.add_argument("--step-ms", type=float, default=30.0, help="how long a GPU computes a step (30)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of a turn (60)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    batches, turns, steps = ([2], 1, 5) if arguments.quick else (arguments.batches, arguments.turns, arguments.steps)
    os.environ |= {"HISTOSPEC_VERIFY_COST": "0.05", "HISTOSPEC_NAMESPACE": "waits"}
    print(heading(HEAD), end="")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = models.write(Path(name, "toy"), models.DRY.shapes["toy"], LETTERS)
        for shards in arguments.shards:
            with service(shards) as servers:
                os.environ["HISTOSPEC_ENDPOINT"] = ",".join(f"{n}={server.endpoint}" for n, server in servers.items())
                for batch in batches:
                    figures = measured(folder, batch, arguments.step_ms / 1e3, turns, steps)
                    rows.append((shards, batch, *figures))
                    cells = [str(shards), str(batch), *(f"{figure:.2f}" for figure in figures)]
                    print(line(cells), end="", flush=True)
    if len(batches) > 1:
        print_costs(np.array(rows))


def print_costs(rows: NDArray[np.float64]) -> None:
    """Prints the costs for the model, from the rows of the table."""
    table = dict(zip(HEAD, rows.T, strict=True))
    batches = table["requests"]
    messages = [Plan(sequences=int(batch), siblings=GROUP).messages(int(shards)) for shards, batch in rows[:, :2]]
    for name, column in (("adapter", "its CPU"), ("hidden", "hidden")):
        factors = np.stack([np.ones(len(rows)), np.array(messages) - 1, batches], axis=1)
        once, message, session = 1e3 * np.linalg.lstsq(factors, table[column], rcond=None)[0]
        print(f"{name}: {once:.0f} a step, {message:.0f} a further message, {session:.2f} a session, in microseconds")


if __name__ == "__main__":
    main()
