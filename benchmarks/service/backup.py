"""Measures a backup over the network and its restore: time, memory of both sides, and the steps of a small worker.

It fills a server with responses. Then `histospec snapshot --from` runs while a worker steps 8 sessions every 10 ms, and
`histospec restore --to` loads the file into an empty server in the same way. The command runs at a lower priority,
because it stands for another machine. Every other second it is stopped, and a process of the same priority computes
instead, so that both halves of the steps have the same machine. Prints a Markdown table.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.process import MIB
from benchmarks.service.pressure import Worker
from benchmarks.tables import heading, line
from examples.draft_server import DraftServer, running
from histospec.client import DraftClient, Response

NAMESPACE = "run"
GROUP = 16  # responses per problem and epoch
EPOCHS = 4
TOGETHER = 64  # problems per ingest call
NICE = 10
TURN = 1.0  # seconds
LATE = 20.0  # milliseconds: the default deadline of a step


class Taken(NamedTuple):
    """The cost of a command."""

    seconds: float
    """How long it ran."""
    own: int
    """Peak memory of its process, in bytes."""
    servers: int
    """Peak memory of the server, in bytes, less its memory before."""
    steps: list[float]
    """Milliseconds of the worker's steps while it ran."""
    others: list[float]
    """Milliseconds of the worker's steps while another process computed."""


class Turns:
    """Two processes that run in turns."""

    def __init__(self, *processes: "subprocess.Popen[bytes]") -> None:
        self._processes = list(processes)
        self._processes[1].send_signal(signal.SIGSTOP)
        self._until = time.monotonic() + TURN
        self.seconds = 0.0
        """Seconds in which the first process ran, without the present turn."""
        self.first = True
        """Whether it is the turn of the first process."""

    @property
    def elapsed(self) -> float:
        """Seconds of the present turn so far."""
        return time.monotonic() - self._until + TURN

    def look(self) -> None:
        """Starts the next turn if it is time."""
        if (late := time.monotonic() - self._until) < 0:
            return
        running, waiting = self._processes if self.first else self._processes[::-1]
        running.send_signal(signal.SIGSTOP)
        waiting.send_signal(signal.SIGCONT)
        self.seconds += self.first * (TURN + late)
        self.first = not self.first
        self._until = time.monotonic() + TURN


def fill(server: DraftServer, responses: int, length: int) -> None:
    """Ingests this many responses with log-probabilities; problems have GROUP responses in each of EPOCHS epochs."""
    random = np.random.default_rng(0)
    problems = range(max(1, responses // (GROUP * EPOCHS)))
    with DraftClient(server.endpoint, NAMESPACE, deadline=60.0) as client:
        for epoch in range(EPOCHS):
            for start in range(0, len(problems), TOGETHER):
                prompts = [[problem, 1] for problem in problems[start : start + TOGETHER]]
                texts = random.integers(0, 150_000, (len(prompts), GROUP, length), np.int32)
                logprobs = -random.standard_exponential((len(prompts), GROUP, length), np.float32)
                groups = [
                    [Response(text, logprobs=known) for text, known in zip(some, whose, strict=True)]
                    for some, whose in zip(texts, logprobs, strict=True)
                ]
                assert all(client.ingest_many(prompts, groups, epoch))


def held(server: DraftServer, what: str) -> int:
    """Returns the memory of a server in bytes: VmRSS, or VmHWM, the peak since the last reset."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


@contextmanager
def worker(server: DraftServer) -> Iterator[Worker]:
    """Yields a worker, and ends its stream afterwards."""
    stepping = Worker(server.endpoint)
    try:
        yield stepping
    finally:
        stepping.end()


def run(server: DraftServer, stepping: Worker, *words: str) -> Taken:
    """Runs a `histospec` command while the worker steps."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    before = held(server, "VmRSS")
    politely = ["nice", "-n", str(NICE), sys.executable]
    process = subprocess.Popen([*politely, "-m", "histospec.server", *words])
    other = subprocess.Popen([*politely, "-c", "while True: pass"])
    turns = Turns(process, other)
    steps: tuple[list[float], list[float]] = [], []
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        turns.look()
        steps[not turns.first].append(stepping.step())
    seconds = turns.seconds + turns.first * turns.elapsed
    other.kill()
    other.wait()
    if status:
        raise RuntimeError(f"{words} ended with {status}")
    process.returncode = 0
    most = max(0, held(server, "VmHWM") - before)
    return Taken(seconds, usage.ru_maxrss * 1024, most, *steps)


def row(name: str, taken: Taken) -> str:
    """Returns a row of the table."""
    memory = f"{taken.own / MIB:.0f} MiB", f"{taken.servers / MIB:.0f} MiB"
    halves = []
    for steps in (np.array(taken.others), np.array(taken.steps)):
        p50, p99 = np.quantile(steps, [0.5, 0.99])
        halves.append(f"{p50:.1f}, {p99:.1f}, {np.mean(steps > LATE):.1%}")
    return line([name, f"{taken.seconds:.1f} s", *memory, *halves, str(len(taken.steps))])


def measure(responses: int, length: int) -> Iterator[str]:
    """Yields two rows: the snapshot and the restore of this many responses."""
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), str(Path(name, "all.jsonl.gz"))
        with running(folder / "data", folder / "log") as server, worker(server) as stepping:
            fill(server, responses, length)
            taken = run(server, stepping, "snapshot", file, "--from", server.endpoint, "--namespace", NAMESPACE)
            yield row(f"snapshot of {responses:,}", taken)
        size = os.stat(file).st_size / MIB
        with running(folder / "new", folder / "log") as server, worker(server) as stepping:
            taken = run(server, stepping, "restore", file, "--to", server.endpoint, "--namespace", NAMESPACE)
            yield row(f"restore of {responses:,} ({size:.0f} MiB)", taken)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, nargs="*", default=[25_600, 102_400], help="in the store")
    parser.add_argument("--length", type=int, default=200, help="tokens of each")
    options = parser.parse_args()
    steps = "p50 ms, p99 ms, over 20 ms"
    head = ["command", "time", "its memory", "server's, beyond what it held", f"another process: {steps}",
            f"the command: {steps}", "steps"]  # fmt: skip
    print(heading(head), end="", flush=True)
    for responses in options.responses:
        for text in measure(responses, options.length):
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()
