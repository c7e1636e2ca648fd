"""Measures how long a worker waits for a step after a pause, as it does while its GPU decodes.

`python -m benchmarks.service.waits [--trees BEFORE NOW]` compares checkouts, each with a server and a worker of its own
(`messages.py`). `--awake` adds each checkout once more, with an idle-class process on each core, which keeps the cores
from halting. `--flags --threads 1` gives the servers flags. All take turns: after pauses of 30 ms, of 5 ms, and
without a pause. Prints a Markdown table; times are medians over the rounds, in microseconds.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.service.messages import ROOT, Side, Turn, side
from benchmarks.tables import heading, line
from benchmarks.turns import by_turns, medians

SPINNER = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""
Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def spinners() -> Iterator[list[Process]]:
    """Runs a stopped idle-class process for each core."""
    running = [subprocess.Popen([sys.executable, "-c", SPINNER, str(core)]) for core in os.sched_getaffinity(0)]
    time.sleep(0.5)  # until they are in their class
    try:
        _signal(running, signal.SIGSTOP)
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def turns(
    one: Side, awake: Sequence[Process], batch: int, steps: Mapping[float, int], jitter: float
) -> dict[float, Turn]:
    """Makes a turn for each pause, in milliseconds, while the processes `awake` run."""
    _signal(awake, signal.SIGCONT)
    try:
        return {pause: one.turn(batch, count, pause / 1e3, jitter) for pause, count in steps.items()}
    finally:
        _signal(awake, signal.SIGSTOP)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT], metavar="DIR", help="checkouts (this one)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of the servers, the last option")
    parser.add_argument("--awake", action="store_true", help="also with cores that an idle-class process keeps awake")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256], help="sessions of a step (1 64 256)")
    parser.add_argument("--pauses", type=float, nargs="+", default=[30, 5, 0], help="milliseconds (30 5 0)")
    parser.add_argument("--jitter", type=float, default=0.02, help="coefficient of variation of a pause (0.02)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each checkout (5)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a turn with pauses of 30 ms (100)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    args = parser.parse_args()
    batches, rounds, most = ([1, 4], 1, 10) if args.quick else (args.batches, args.rounds, args.steps)
    steps = {pause: most if pause > 10 else 2 * most for pause in args.pauses}
    with contextlib.ExitStack() as stack:
        sides = {tree: stack.enter_context(side(tree.absolute(), args.flags)) for tree in args.trees}
        awake = stack.enter_context(spinners()) if args.awake else []
        head = ["checkout", "sessions", "pause, ms", "p50", "of no pause", "of the first", "p99", "worker", "service"]
        print(heading(head), end="")
        for batch in batches:
            ways = {
                (tree.resolve().name + (", cores awake" if spinning else "")): partial(
                    turns, one, spinning, batch, steps, args.jitter
                )
                for tree, one in sides.items()
                for spinning in ([], awake)[: 1 + args.awake]
            }
            found = by_turns(ways, rounds)
            first = next(iter(found.values()))
            for name, mine in found.items():
                for pause in steps:
                    print(line([name, str(batch), f"{pause:g}", *_cells(pause, mine, first)]), end="", flush=True)


def _cells(pause: float, mine: Sequence[dict[float, Turn]], first: Sequence[dict[float, Turn]]) -> list[str]:
    """Returns the figures of a row."""
    middle = medians({field: [getattr(one[pause], field) for one in mine] for field in Turn._fields})
    ratios = medians(
        {
            "no pause": [one[pause].p50 / one[min(one)].p50 for one in mine],
            "first": [one[pause].p50 / before[pause].p50 for one, before in zip(mine, first, strict=True)],
        }
    )
    p50, *others = (f"{middle[field]:,.0f}" for field in Turn._fields)
    return [p50, f"{ratios['no pause']:.2f}", f"{ratios['first']:.2f}", *others]


if __name__ == "__main__":
    main()
