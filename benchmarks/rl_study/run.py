"""RL runs by method and seed, with tables and plots of their results and costs.

    python -m benchmarks.rl_study.run                    # all runs: takes hours; keeps existing runs
    python -m benchmarks.rl_study.run --methods none HistoSpec --seeds 1 2
    python -m benchmarks.rl_study.run --draw             # only the tables and plots of the existing runs
    python -m benchmarks.rl_study.run --quick            # shows that it runs; the figures mean nothing

Every run has a process of its own (trial.py), with a draft server and a store of its own. Methods take turns, seed by
seed, so that a slow hour of the machine affects all of them. docs/study.md has the results.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import track

from benchmarks.rl_study import plots, runs, tables
from benchmarks.rl_study.methods import METHODS, SIZES, Method
from examples import draft_server

SEEDS = 5


def main() -> int:
    """Runs what is missing and draws everything. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, SEEDS + 1)), metavar="SEED")
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--out", type=Path, default=Path("build/study"), help="folder for runs and plots")
    parser.add_argument("--page", type=Path, help="a page in which to replace the tables, such as docs/study.md")
    parser.add_argument("--runs", type=Path, help="folder for the runs (default: runs/ in --out)")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="few problems, three epochs, one seed")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="of a run; default: trial.Size")
    arguments = parser.parse_args()
    folder = arguments.runs or arguments.out / "runs"
    for made in (folder, arguments.out):
        made.mkdir(parents=True, exist_ok=True)
    missing = [
        (METHODS[name], seed)
        for seed in (arguments.seeds[:1] if arguments.quick else arguments.seeds)
        for name in arguments.methods
        if not runs.file_of(folder, name, seed).exists()
    ]
    options = [f"--{name}={value}" for name in SIZES if (value := getattr(arguments, name)) is not None]
    options += ["--quick"] if arguments.quick else []
    failed = [] if arguments.draw else list(roll_all(missing, folder, arguments.jobs, options))
    found = runs.load(folder, METHODS)
    for name, reason in failed:
        print(f"{name} failed: {reason}", file=sys.stderr)
    if not found:
        parser.error(f"there are no runs in {folder}; run without --draw first, or set --runs")
    plots.save(found, arguments.out)
    said = tables.text(found)
    print(said)
    if arguments.page:
        tables.insert(said, arguments.page)
    return bool(failed)


def roll_all(
    missing: list[tuple[Method, int]], folder: Path, jobs: int, options: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Runs what is missing, with options for trial.py. Yields each that failed: its name, the end of its output."""
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda one: (one, roll(one[0], one[1], folder, options)), missing)
        for (method, seed), reason in track(done, "runs", total=len(missing)):
            if reason is not None:
                yield f"{method.name}, seed {seed}", reason


def roll(method: Method, seed: int, folder: Path, options: Sequence[str]) -> str | None:
    """Runs one run, and writes its file when it is complete. Returns None, or the end of the output if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result"
        command = [sys.executable, "-m", "benchmarks.rl_study.trial", method.name, str(seed), str(result), *options]
        with draft_server.running(Path(scratch) / "store", Path(scratch) / "log") as server:
            started = server.cpu_seconds()
            environment = os.environ | {"HISTOSPEC_ENDPOINT": server.endpoint, "HISTOSPEC_NAMESPACE": "study"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            served = server.cpu_seconds() - started
        if done.returncode == 0:
            end = json.dumps({"server_seconds": round(served, 3)})
            text = f"{result.read_text()}{end}\n".encode()
            runs.file_of(folder, method.name, seed).write_bytes(gzip.compress(text, mtime=0))
            return None
        return f"{done.stdout}{done.stderr}"[-2000:]


if __name__ == "__main__":
    sys.exit(main())
