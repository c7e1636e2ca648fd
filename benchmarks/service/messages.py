"""Measures what a message costs besides the engine: latency of a step, and the CPU time of worker and service.

`python -m benchmarks.service.messages [--trees BEFORE NOW]` compares checkouts. Each must be built (`make setup`, or
`python setup.py build_ext --inplace`) and has a server and a worker of its own. They take turns of some hundred steps.
CPU time is that of all threads of a process. Prints a Markdown table.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.process import cpu_seconds
from benchmarks.tables import heading, line
from benchmarks.turns import by_turns, medians
from examples.draft_server import DraftServer, running

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("messages_worker.py")


class Turn(NamedTuple):
    """The microseconds of a turn."""

    p50: float
    """Of a step, from sending the tokens to the drafts."""
    p99: float
    worker: float
    """CPU time of the worker per step, in the client's calls and between them."""
    service: float
    """CPU time of the server per step."""


class Side:
    """A server and a worker of one checkout."""

    def __init__(self, server: DraftServer, worker: "subprocess.Popen[str]") -> None:
        self._server = server
        self._worker = worker

    def turn(self, batch: int, steps: int, pause: float = 0.0, jitter: float = 0.0) -> Turn:
        """Makes steps of `batch` sessions, and before each a pause of so many seconds, as messages_worker.py says."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(f"{batch} {steps} {pause} {jitter}\n")
        self._worker.stdin.flush()
        self._worker.stdout.readline()  # once it is warm
        before = cpu_seconds(self._server.pid)
        seconds, busy = json.loads(self._worker.stdout.readline())
        service = cpu_seconds(self._server.pid) - before
        p50, p99 = np.quantile(seconds, [0.5, 0.99]).tolist()
        return Turn(*(1e6 * value for value in (p50, p99, busy / steps, service / steps)))


@contextlib.contextmanager
def side(tree: Path, flags: Sequence[str]) -> Iterator[Side]:
    """Runs the server and the worker of a checkout."""
    paths = {"PYTHONPATH": f"{tree / '.typing'}{os.pathsep}{tree}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            running(folder / "data", folder / "log", *flags, environment=paths) as server,
            subprocess.Popen(
                [sys.executable, str(WORKER), server.endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | paths,
            ) as worker,
        ):
            yield Side(server, worker)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs="+", default=[ROOT], metavar="DIR", help="checkouts (this one)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="sessions of a step (1 16 64)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each checkout (20)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a turn at batch 1; fewer at larger ones (300)")
    parser.add_argument("--threads", type=int, default=0, help="--threads of the servers (0)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    args = parser.parse_args()
    batches, rounds, steps = ([1, 4], 1, 20) if args.quick else (args.batches, args.rounds, args.steps)
    with contextlib.ExitStack() as stack:
        flags = ["--threads", str(args.threads)]
        sides = {tree: stack.enter_context(side(tree.absolute(), flags)) for tree in args.trees}
        figures = [cell for name in ("p50", "p99", "worker", "service") for cell in (f"{name}, us", "of the first")]
        head = ["checkout", "sessions", *figures]
        print(heading(head), end="")
        for batch in batches:
            count = max(20, 16 * steps // (16 + batch))
            turns = by_turns({tree: partial(one.turn, batch, count) for tree, one in sides.items()}, rounds)
            for tree, mine in turns.items():
                cells: list[str] = []
                for place in range(len(Turn._fields)):
                    ratios = [now[place] / first[place] for now, first in zip(mine, turns[args.trees[0]], strict=True)]
                    middle = medians({"value": [turn[place] for turn in mine], "ratio": ratios})
                    cells += [f"{middle['value']:,.0f}", f"{middle['ratio']:.2f}"]
                print(line([tree.resolve().name, str(batch), *cells]), end="", flush=True)


if __name__ == "__main__":
    main()
