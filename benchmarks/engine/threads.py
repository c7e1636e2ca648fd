"""Measures the gain of further threads in a step: `python -m benchmarks.engine.threads [--threads 1 2 4] [--quick]`.

Engines with different numbers of worker threads have the same history and step the same sessions, in turns of eight
steps. The measured time is wall-clock time. benchmarks/README.md explains each number.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.engine.replay import TURN, Replay, Step
from benchmarks.engine.rollouts import SIBLINGS, generated
from benchmarks.turns import medians
from histospec.native import Engine

CONTEXT = 512  # how many tokens of its response each session has at the start


def measured(batch: int, length: int, rounds: int, numbers: Sequence[int]) -> dict[int, list[float]]:
    """Returns the seconds of every step, by number of threads. Raises RuntimeError if their drafts differ."""
    rollouts = generated(max(1, batch // SIBLINGS), 16, length, batch)
    engines = {threads: Engine(memory_bytes=16 << 30, threads=threads) for threads in numbers}
    for engine in engines.values():
        for prompt, responses in zip(rollouts.prompts, rollouts.history, strict=True):
            engine.ingest("bench", prompt, responses)
    live = [(rollouts.prompts[problem], text) for problem, text in rollouts.live]
    seconds: dict[int, list[float]] = {threads: [] for threads in numbers}
    for _ in range(rounds):
        replays = {threads: Replay(engine, live, min(CONTEXT, length // 4)) for threads, engine in engines.items()}
        while not any(replay.done for replay in replays.values()):
            turns = {threads: turn(replay) for threads, replay in replays.items()}
            for steps in zip(*turns.values(), strict=True):
                if not all(np.array_equal(step.tokens, steps[0].tokens) for step in steps):
                    raise RuntimeError("drafts depend on the number of threads")
            for threads, steps_of in turns.items():
                seconds[threads] += [step.wall for step in steps_of]
        for replay in replays.values():
            replay.close()
    return seconds


def turn(replay: Replay) -> list[Step]:
    """Makes at most TURN steps, until the responses end."""
    steps: list[Step] = []
    while len(steps) < TURN and not replay.done:
        steps.append(replay.step())
    return steps


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 1024], help="sessions of a step (256 1024)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of an engine (1 2)")
    args = parser.parse_args()
    batches, length = ([32], 300) if args.quick else (args.batches, 2000)
    print(
        f"{'batch':>8}"
        + "".join(f"{threads:>6} {'thread' if threads == 1 else 'threads':<16}" for threads in args.threads)
    )
    for batch in batches:
        seconds = measured(batch, length, 1, args.threads)
        times, first = medians(seconds), seconds[args.threads[0]]
        faster = medians(
            {each: [one / more for one, more in zip(first, seconds[each], strict=True)] for each in seconds}
        )
        print(f"{batch:8,}" + "".join(f"{times[each] * 1e3:10.2f} ms {faster[each]:6.2f}x  " for each in args.threads))


if __name__ == "__main__":
    main()
