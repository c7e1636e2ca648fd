"""Compares index and drafter with Arctic Inference, in process: `python -m benchmarks.engine.compare [--quick]`.

Both run in one process and take turns, so that a busy machine slows both; figures are medians. Time is the CPU time of
the process with all its threads. benchmarks/README.md explains each number.
"""

import argparse
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.engine.drafters import Drafter, HistoSpec, available
from benchmarks.engine.replay import TURN
from benchmarks.engine.rollouts import Rollouts, generated, recorded
from benchmarks.process import resident
from benchmarks.turns import by_turns, medians
from histospec.replay.recordings import Tokens

APPENDED = 3  # how many tokens a session appends in a step


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements."""

    problems: int
    responses: int
    length: int
    rounds: int
    steps: int
    context: int
    batches: tuple[int, ...]
    histories: tuple[int, ...]
    recorded_tokens: int


FULL = Sizes(8, 16, 2000, 7, 40, 512, (1, 32, 256, 1024), (4, 16, 64), 400_000)
QUICK = Sizes(2, 4, 300, 3, 5, 64, (1, 32), (1, 4), 5_000)

Row = dict[str, object]


def ingest(rollouts: Rollouts, rounds: int, one_by_one: bool) -> Row:
    """Returns ingested tokens per CPU-second, until every problem has drafted once."""
    ways = {name: partial(_ingested, drafter, rollouts, one_by_one) for name, drafter in available().items()}
    seconds = medians(by_turns(ways, rounds))
    rates = {name: rollouts.tokens() / median / 1e6 for name, median in seconds.items()}
    how = "one by one" if one_by_one else "by the group"
    return row(f"ingest {rollouts.name}, {how}", "M tokens/s", rates, better=max)


def _ingested(drafter: type[Drafter], rollouts: Rollouts, one_by_one: bool) -> float:
    """Returns the CPU seconds until every problem has drafted once."""
    index = drafter()
    gc.collect()
    start = time.process_time()
    for prompt, responses in zip(rollouts.prompts, rollouts.history, strict=True):
        for batch in [[response] for response in responses] if one_by_one else [responses]:
            index.ingest(prompt, batch)
    index.open(rollouts.prompts, 8)
    index.step(np.stack([responses[0][:2] for responses in rollouts.history]))
    return time.process_time() - start


def memory(rollouts: Rollouts) -> list[Row]:
    """Returns bytes per token: growth of the resident memory of a child process, and memory_bytes()."""
    held, claimed = {}, {}
    for name, drafter in available().items():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            grown, says = process.submit(_grow, drafter, rollouts).result()
        held[name] = grown / rollouts.tokens()
        if says is not None:
            claimed[name] = says / rollouts.tokens()
    return [
        row(f"resident memory {rollouts.name}", "bytes/token", held, better=min),
        row(f"memory_bytes() {rollouts.name}", "bytes/token", claimed, better=min),
    ]


def _grow(drafter: type[Drafter], rollouts: Rollouts) -> tuple[int, int | None]:
    warm = generated(1, 2, 100, seed=99)  # for the allocations of the first use
    first = drafter()
    first.ingest(warm.prompts[0], warm.history[0])
    index = drafter()
    gc.collect()
    before = resident()
    for prompt, responses in zip(rollouts.prompts, rollouts.history, strict=True):
        index.ingest(prompt, responses)
    gc.collect()
    return resident() - before, index.engine.memory_bytes() if isinstance(index, HistoSpec) else None


@dataclass(frozen=True)
class Stepping:
    """Sessions of one drafter in the middle of their responses, and the times of their steps.

    Attributes:
        index: the drafter, its history ingested and its sessions open.
        texts: int32[sessions, context + steps * APPENDED], the responses of the sessions.
        seconds: CPU time of each step.
        drafted: number of drafted tokens of each step.

    """

    index: Drafter
    texts: Tokens
    seconds: list[float]
    drafted: list[int]

    def micros(self) -> float:
        """Returns the median CPU time of a step per session, in microseconds."""
        return statistics.median(self.seconds) / len(self.texts) * 1e6


def stepped(cases: list[Rollouts], steps: int, context: int, turn: int = TURN) -> list[dict[str, Stepping]]:
    """Runs every drafter on every case, in turns of this many steps."""
    running = [
        {name: started(drafter(), case, steps, context) for name, drafter in available().items()} for case in cases
    ]
    for first in range(0, steps, turn):
        for drafters in running:
            for one in drafters.values():
                for begin in range(context + first * APPENDED, context + min(first + turn, steps) * APPENDED, APPENDED):
                    new = np.ascontiguousarray(one.texts[:, begin : begin + APPENDED])
                    start = time.process_time()
                    drafted = one.index.step(new)
                    one.seconds.append(time.process_time() - start)
                    one.drafted.append(drafted)
    for case, drafters in zip(cases, running, strict=True):
        for name, one in drafters.items():
            one.index.close()
            if not any(one.drafted):
                raise RuntimeError(f"{name} drafted nothing on {case.name}: its time would mean nothing")
    return running


def started(index: Drafter, rollouts: Rollouts, steps: int, context: int) -> Stepping:
    """Returns sessions `context` tokens into their responses, with the history ingested."""
    texts = np.stack([text[: context + steps * APPENDED] for _, text in rollouts.live])
    for prompt, responses in zip(rollouts.prompts, rollouts.history, strict=True):
        index.ingest(prompt, responses)
    index.open([rollouts.prompts[problem] for problem, _ in rollouts.live], texts.shape[1])
    index.step(np.ascontiguousarray(texts[:, :context]))
    return Stepping(index, texts, [], [])


def step(rollouts: Rollouts, steps: int, context: int, turn: int = TURN) -> Row:
    """Measures the cost of a step per session."""
    (drafters,) = stepped([rollouts], steps, context, turn)
    micros = {name: one.micros() for name, one in drafters.items()}
    drafted = {name: statistics.mean(one.drafted) / len(one.texts) for name, one in drafters.items()}
    cold = "" if turn > 1 else ", cold"
    return row(f"step {rollouts.name}, batch {len(rollouts.live)}{cold}", "us/session", micros, min, drafted=drafted)


def growth(sizes: Sizes) -> Row:
    """Measures how much slower a step gets from the smallest to the largest history."""
    batch, (few, many) = sizes.batches[-2], (sizes.histories[0], sizes.histories[-1])
    cases = [generated(max(1, batch // 16), responses, sizes.length, batch, seed=3) for responses in (few, many)]
    small, large = stepped(cases, sizes.steps, sizes.context)
    factors = {name: large[name].micros() / small[name].micros() for name in small}
    return row(f"step growth from {few} to {many} responses a problem, batch {batch}", "times", factors, min)


def row(what: str, unit: str, values: dict[str, float], better: Callable[..., float], **more: object) -> Row:
    """Returns a row of results; its ratio says how many times better than the peer HistoSpec is."""
    ratio = None
    if set(values) == {"Arctic", "HistoSpec"} and all(
        values.values()
    ):  # with tiny sizes the growth may be less than one page
        ours, theirs = values["HistoSpec"], values["Arctic"]
        ratio = ours / theirs if better is max else theirs / ours
    return {"what": what, "unit": unit, **values, "ratio": ratio, **more}


def measure(sizes: Sizes, folder: Path | None) -> Iterator[Row]:
    """Yields every row."""
    made = generated(sizes.problems, sizes.responses, sizes.length)
    yield ingest(made, sizes.rounds, one_by_one=False)
    yield ingest(made, sizes.rounds, one_by_one=True)
    yield from memory(made)
    for batch in sizes.batches:
        rollouts = generated(max(1, batch // 16), sizes.responses, sizes.length, batch, seed=batch)
        yield step(rollouts, sizes.steps, sizes.context)
        if batch == sizes.batches[-2]:
            yield step(rollouts, sizes.steps, sizes.context, turn=1)
    yield growth(sizes)
    if folder is not None:
        needed = 16 + sizes.steps * APPENDED
        for rollouts in recorded(folder, sizes.recorded_tokens, 256 if sizes is FULL else 16, needed):
            yield ingest(rollouts, sizes.rounds, one_by_one=False)
            yield from memory(rollouts)
            if rollouts.live:
                yield step(rollouts, sizes.steps, 16)


def main() -> None:
    """Measures and prints every row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    parser.add_argument("--rollouts", type=Path, metavar="DIR", help="also measure on the recordings of this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    args = parser.parse_args()
    names = list(available())
    print(f"{machine()}; {', '.join(names)}; medians, taking turns in one process")
    if "Arctic" not in names:
        print("Arctic Inference is not installed: pip install --no-deps arctic-inference==0.1.1 (compiles for minutes)")
    print(f"{'':58}{'':12}" + "".join(f"{name:>12}" for name in names) + f"{'better by':>12}")
    rows = []
    for result in measure(QUICK if args.quick else FULL, args.rollouts):
        rows.append(result)
        values = "".join(f"{result[name]:12.3f}" if name in result else f"{'-':>12}" for name in names)
        ratio = f"{result['ratio']:11.1f}x" if result["ratio"] else ""
        print(f"{result['what']:58}{result['unit']:>12}{values}{ratio}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


def machine() -> str:
    """Returns the processor, the number of cores and the versions."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    processor = names[0] if names else platform.machine()
    versions = f"Python {platform.python_version()}, histospec {importlib.metadata.version('histospec')}"
    return f"{processor}, {os.cpu_count()} cores, {versions}"


if __name__ == "__main__":
    main()
