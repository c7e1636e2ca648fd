"""What a backup over the network and its restore take: time, memory of both sides, and the steps of a small worker.

A server is filled with responses; then `histospec snapshot --from` runs while a worker steps 8 sessions every 10 ms,
and `histospec restore --to` brings the file to an empty server in the same way. The command runs at a lower priority,
because it stands for another machine. Prints a Markdown table.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.process import MIB
from benchmarks.service.pressure import MEASURED, Worker, seconds_over
from benchmarks.tables import heading, line
from examples.draft_server import DraftServer, running
from histospec.client import DraftClient, Response

NAMESPACE = "run"
GROUP = 16  # responses of a problem and epoch
EPOCHS = 4
TOGETHER = 64  # problems ingested in one call
NICE = 10


class Taken(NamedTuple):
    """What a command took."""

    seconds: float
    own: int
    """Bytes that its process held at most."""
    servers: int
    """Bytes that the server held at most, beyond what it held before."""
    steps: list[float]
    """Milliseconds of the worker's steps meanwhile."""


def fill(server: DraftServer, responses: int, length: int) -> None:
    """Ingests so many responses, with log-probabilities, of problems with GROUP responses in each of EPOCHS epochs."""
    random = np.random.default_rng(0)
    problems = range(max(1, responses // (GROUP * EPOCHS)))
    with DraftClient(server.endpoint, NAMESPACE, deadline=60.0) as client:
        for epoch in range(EPOCHS):
            for start in range(0, len(problems), TOGETHER):
                prompts = [[problem, 1] for problem in problems[start : start + TOGETHER]]
                texts = random.integers(0, 150_000, (len(prompts), GROUP, length), np.int32)
                logprobs = np.log(random.random((len(prompts), GROUP, length), np.float32))
                groups = [
                    [Response(text, logprobs=known) for text, known in zip(some, whose, strict=True)]
                    for some, whose in zip(texts, logprobs, strict=True)
                ]
                assert all(client.ingest_many(prompts, groups, epoch))


def held(server: DraftServer, what: str) -> int:
    """Bytes of memory that a server holds: VmRSS, or VmHWM, the most since the last look."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


@contextmanager
def worker(server: DraftServer) -> Iterator[Worker]:
    """A worker whose stream ends."""
    stepping = Worker(server.endpoint)
    try:
        yield stepping
    finally:
        stepping.end()


def run(server: DraftServer, stepping: Worker, *words: str) -> Taken:
    """Runs a command of ours while the worker steps."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    before = held(server, "VmRSS")
    process = subprocess.Popen(["nice", "-n", str(NICE), sys.executable, "-m", "histospec.server", *words])
    ended: list[resource.struct_rusage] = []
    started = os.times().elapsed

    def over() -> bool:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            assert status == 0, words
            ended.append(usage)
        return bool(pid)

    steps = stepping.until(over)
    seconds = os.times().elapsed - started
    return Taken(seconds, ended[0].ru_maxrss * 1024, max(0, held(server, "VmHWM") - before), steps)


def row(name: str, quiet: list[float], taken: Taken) -> str:
    """A row of the table."""
    (p50, p99), (b50, b99) = (np.quantile(steps, [0.5, 0.99]) for steps in (quiet, taken.steps))
    memory = f"{taken.own / MIB:.0f} MiB", f"{taken.servers / MIB:.0f} MiB"
    times = f"{p50:.1f}, {p99:.1f}", f"{b50:.1f}, {b99:.1f}"
    return line([name, f"{taken.seconds:.1f} s", *memory, *times, f"{np.mean(np.array(taken.steps) > 20):.2%}"])


def measure(responses: int, length: int) -> Iterator[str]:
    """Two rows: the snapshot and the restore of so many responses."""
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), str(Path(name, "all.jsonl.gz"))
        with running(folder / "data", folder / "log") as server, worker(server) as stepping:
            fill(server, responses, length)
            quiet = stepping.until(seconds_over(MEASURED))
            taken = run(server, stepping, "snapshot", file, "--from", server.endpoint, "--namespace", NAMESPACE)
            yield row(f"snapshot of {responses:,}", quiet, taken)
        size = os.stat(file).st_size / MIB
        with running(folder / "new", folder / "log") as server, worker(server) as stepping:
            quiet = stepping.until(seconds_over(MEASURED))
            taken = run(server, stepping, "restore", file, "--to", server.endpoint, "--namespace", NAMESPACE)
            yield row(f"restore of {responses:,} ({size:.0f} MiB)", quiet, taken)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, nargs="*", default=[25_600, 102_400], help="in the store")
    parser.add_argument("--length", type=int, default=200, help="tokens of each")
    options = parser.parse_args()
    print(
        heading(
            ["command", "time", "its memory", "server's, beyond what it held", "quiet: step p50, p99 ms",
             "meanwhile: p50, p99 ms", "over 20 ms"]
        ), end="", flush=True,
    )  # fmt: skip
    for responses in options.responses:
        for text in measure(responses, options.length):
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()
