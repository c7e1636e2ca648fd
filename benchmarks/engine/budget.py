"""Ingests more history than the budget holds while steps go on: `python -m benchmarks.engine.budget [--quick]`.

One thread ingests; another steps a batch of 256 sessions without a pause. benchmarks/README.md explains each number.
"""

import argparse
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.engine.replay import Replay
from benchmarks.engine.rollouts import BATCH, MILLION, RESPONSES, SIBLINGS, Texts
from benchmarks.process import MIB, Child, forget_peak, peak, settled
from histospec.native import Engine
from histospec.replay.recordings import Tokens


@dataclass(frozen=True)
class Phase:
    """The steps of a phase: percentiles of their duration in milliseconds, and their number."""

    p50: float
    p99: float
    steps: int


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        phases: for each part, the quiet phase before it and the phase of its ingestion.
        tokens: ingested tokens.
        seconds: duration of the ingestion.
        held: tokens in the history at the end.
        evicted: evicted responses.
        claimed: memory_bytes() at the end.
        grown: growth of the process at its peak, in bytes, since before the engine was made.
        process: bytes of the process at its peak, without the texts that wait to be ingested.

    """

    phases: list[tuple[Phase, Phase]]
    tokens: int
    seconds: float
    held: int
    evicted: int
    claimed: int
    grown: int
    process: int


class Budgeted:
    """An engine with a budget and the texts to ingest, which are made before the steps so as not to disturb them."""

    def __init__(self, tokens: int, budget: int, length: int) -> None:
        texts = Texts(length)
        self._problems = [texts.problem(problem, RESPONSES) for problem in range(round(tokens / (RESPONSES * length)))]
        self._live = texts.live(range(BATCH // SIBLINGS), RESPONSES, SIBLINGS)
        self._text_bytes = sum(text.nbytes for _, written in self._problems for text in written)
        self._context = length // 4
        self._before = settled()
        forget_peak()
        self._engine = Engine(memory_bytes=budget)

    def run(self, parts: int, quiet: int) -> Outcome:
        """Ingests in parts. Steps `quiet` times before each part, and as often as possible during it."""
        used, rest = self._problems[: BATCH // SIBLINGS], self._problems[BATCH // SIBLINGS :]
        self._ingest(used)
        self._replay = Replay(self._engine, self._live, self._context)
        phases, seconds = [], 0.0
        for part in range(parts):
            before = _phase([self._step() for _ in range(quiet)])
            ingesting = threading.Thread(target=self._ingest, args=(rest[part::parts],))
            start = time.perf_counter()
            ingesting.start()
            during = [self._step()]
            while ingesting.is_alive():
                during.append(self._step())
            seconds += time.perf_counter() - start
            phases.append((before, _phase(during)))
        namespace = self._engine.stats()["namespaces"]["bench"]
        return Outcome(
            phases,
            self._text_bytes // 4,
            seconds,
            namespace["history_tokens"],
            namespace["evicted_by_memory"],
            self._engine.memory_bytes(),
            peak() - self._before,
            peak() - self._text_bytes,
        )

    def _ingest(self, problems: list[tuple[Tokens, list[Tokens]]]) -> None:
        for prompt, responses in problems:
            self._engine.ingest("bench", prompt, responses)

    def _step(self) -> float:
        """Returns the duration of a step in milliseconds. Sessions at the end of their response start again."""
        if self._replay.done:
            self._replay.close()
            self._replay = Replay(self._engine, self._live, self._context)
        return self._replay.step().wall * 1e3


def _phase(millis: list[float]) -> Phase:
    return Phase(float(np.percentile(millis, 50)), float(np.percentile(millis, 99)), len(millis))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    parser.add_argument("--tokens", type=float, help="millions of tokens to ingest, with --budget")
    parser.add_argument("--budget", type=float, help="MiB that the engine may hold, with --tokens")
    parser.add_argument("--parts", type=int, default=5, help="phases of ingestion, each after a quiet one (5)")
    args = parser.parse_args()
    # All history fits; half of it does; a small part does.
    runs = [(100.0, 2048.0), (400.0, 2048.0), (100.0, 256.0)]
    length, quiet = 2000, 300
    if args.tokens and args.budget:
        runs = [(args.tokens, args.budget)]
    if args.quick:
        runs, length, quiet = [(0.5, 2)], 300, 5

    print(f"{'':>42}{'peak of the process':>22}{'':>20}{'p50':>17}{'p99':>18}")
    print(
        f"{'ingested':>10}{'budget':>12}{'memory_bytes()':>20}{'growth':>10}{'all':>12}{'held':>10}{'evicted':>10}"
        f"{'quiet':>9}{'ingesting':>12}{'times':>8}{'quiet':>9}{'ingesting':>12}{'times':>8}{'steps':>8}{'ingest':>13}"
    )
    for tokens, budget in runs:
        child = Child(Budgeted, round(tokens * MILLION), round(budget * MIB), length)
        outcome = child.call(Budgeted.run, args.parts, quiet)
        child.end()
        print(
            f"{outcome.tokens / MILLION:8.5g} M{budget:8g} MiB{outcome.claimed / MIB:16.0f} MiB"
            f"{outcome.grown / MIB:6.0f} MiB{outcome.process / MIB:8.0f} MiB{outcome.held / MILLION:8.1f} M"
            f"{outcome.evicted:10,}{_columns(outcome, 'p50')}{_columns(outcome, 'p99')}"
            f"{sum(busy.steps for _, busy in outcome.phases):8,}{outcome.tokens / outcome.seconds / MILLION:9.1f} M/s",
            flush=True,
        )


def _columns(outcome: Outcome, percentile: str) -> str:
    """Returns medians over the parts: quiet, ingesting, and their ratio."""
    pairs = [(getattr(quiet, percentile), getattr(busy, percentile)) for quiet, busy in outcome.phases]
    quiet, busy = (statistics.median(values) for values in zip(*pairs, strict=True))
    times = statistics.median(busy / quiet for quiet, busy in pairs)
    return f"{quiet:6.1f} ms{busy:9.1f} ms{times:7.1f}x"


if __name__ == "__main__":
    main()
