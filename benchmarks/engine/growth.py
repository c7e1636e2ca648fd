"""Measures engines with 1, 10 and 100 million tokens of history: `python -m benchmarks.engine.growth [--quick]`.

Each size has a process of its own, so that its memory can be measured. All processes stay and step in turns, so that a
busy machine slows all of them equally; figures are medians. benchmarks/README.md explains each number.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.engine.replay import Replay
from benchmarks.engine.rollouts import BATCH, MILLION, RESPONSES, SIBLINGS, Texts
from benchmarks.process import MIB, Child, settled
from histospec.native import Engine


@dataclass(frozen=True)
class Held:
    """The cost of ingesting, and the memory after it.

    Attributes:
        tokens: tokens of the history.
        cpu: CPU seconds of all threads.
        claimed: memory_bytes().
        resident: growth of the process, in bytes.

    """

    tokens: int
    cpu: float
    claimed: int
    resident: int


@dataclass(frozen=True)
class Round:
    """One round of steps.

    Attributes:
        micros: CPU microseconds of a step per session, the median of the steps.
        advance: tokens per session and step.

    """

    micros: float
    advance: float


class Grown:
    """An engine, and the texts of its history."""

    def __init__(self, tokens: int, length: int = 2000) -> None:
        self._texts = Texts(length)
        self._problems = max(1, round(tokens / (RESPONSES * length)))
        self._texts.problem(0, RESPONSES)  # so that allocations of the first use do not count
        self._before = settled()
        self._engine = Engine(memory_bytes=64 << 30)

    def grow(self) -> Held:
        """Ingests everything."""
        cpu = 0.0
        for problem in range(self._problems):
            prompt, responses = self._texts.problem(problem, RESPONSES)
            start = time.process_time()
            self._engine.ingest("bench", prompt, responses)
            cpu += time.process_time() - start
        start = time.process_time()
        self._engine.wait_until_built()
        cpu += time.process_time() - start
        tokens = self._engine.stats()["namespaces"]["bench"]["history_tokens"]
        return Held(tokens, cpu, self._engine.memory_bytes(), settled() - self._before)

    def round(self, seed: int, context: int, steps: int) -> Round:
        """Steps a batch of sessions on problems from the whole history. Each replays a response that is not in it."""
        drawn = np.random.default_rng(seed).integers(self._problems, size=BATCH // SIBLINGS)
        live = self._texts.live(drawn.tolist(), RESPONSES, SIBLINGS)
        replay = Replay(self._engine, live, context)
        micros: list[float] = []
        while len(micros) < steps and not replay.done:
            micros.append(replay.step().cpu / BATCH * 1e6)
        replay.close()
        return Round(statistics.median(micros), replay.generated / BATCH / len(micros))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 10, 100], help="millions of tokens (1 10 100)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of steps (15)")
    args = parser.parse_args()
    sizes, length, steps = args.sizes, 2000, 30
    if args.quick:
        sizes, length, steps, args.rounds = [0.05, 0.1], 300, 5, 2

    children = [Child(Grown, round(size * MILLION), length) for size in sizes]
    print(f"{'history':>10}{'ingest':>20}{'memory_bytes()':>20}{'process grew':>20}{'they differ':>14}")
    for size, child in zip(sizes, children, strict=True):
        held = child.call(Grown.grow)
        print(
            f"{size:8g} M{held.tokens / held.cpu / MILLION:10.1f} M/s of CPU"
            f"{held.claimed / MIB:10.1f} MiB ={held.claimed / held.tokens:5.1f} B"
            f"{held.resident / MIB:10.1f} MiB ={held.resident / held.tokens:5.1f} B"
            f"{held.claimed / held.resident - 1:+14.1%}",
            flush=True,
        )
    rounds = [[child.call(Grown.round, seed, length // 4, steps) for child in children] for seed in range(args.rounds)]
    print(f"\n{'history':>10}{'step, batch 256':>26}{'times the first':>18}{'tokens a step':>16}")
    smallest = [row[0] for row in rounds]
    for size, own in zip(sizes, zip(*rounds, strict=True), strict=True):
        # Compares neighbours in time, because other load of the machine affects both.
        times = statistics.median(one.micros / first.micros for one, first in zip(own, smallest, strict=True))
        print(
            f"{size:8g} M{statistics.median(one.micros for one in own):15.2f} us/session{times:17.2f}x"
            f"{statistics.mean(one.advance for one in own):16.2f}"
        )
    for child in children:
        child.end()


if __name__ == "__main__":
    main()
