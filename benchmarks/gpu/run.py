"""Measures HistoSpec on one large GPU: the cost of a drafted token, the overhead of drafters, and the gain of rollouts.

    python -m benchmarks.gpu.run --out FOLDER                       # needs vllm and a GPU of 80 GB; about 40 minutes
    python -m benchmarks.gpu.run --out FOLDER --parts cost overhead # some of it
    python -m benchmarks.gpu.run --out FOLDER --dry                 # toys on vLLM's CPU build; figures mean nothing
    python -m benchmarks.gpu.run --out FOLDER --draw                # only the tables and plots, from the results

FOLDER gets one JSON file per part, which is written after each measurement. Results in it are not measured again, so
the same command continues an interrupted run. Each engine has a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import benchmarks.vllm.environment  # noqa: F401 - first

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# isort: split
from benchmarks.gpu import cost as gpu_cost
from benchmarks.gpu import overhead as gpu_overhead
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import speedup as gpu_speedup
from benchmarks.gpu.models import DRY, Scale
from benchmarks.gpu.results import Results


class Part(Protocol):
    """The interface of a part, which is a module."""

    def jobs(self, scale: Scale) -> list[tuple[str, ...]]:
        """Returns the jobs, each for a process of its own, the most informative first."""

    def finished(self, job: tuple[str, ...], results: Results, scale: Scale) -> bool:
        """Returns whether a job is complete."""

    def run(self, job: tuple[str, ...], results: Results, scale: Scale, work: Path) -> None:
        """Does a job."""


PARTS: dict[str, Part] = {"cost": gpu_cost, "overhead": gpu_overhead, "speedup": gpu_speedup}


def main() -> int:
    """Measures what is missing. Returns 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry", action="store_true", help="toy sizes, on vLLM's CPU build")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--work", type=Path, help="folder of models and policies, some GB (default: OUT/work)")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = arguments.work or arguments.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    scale = DRY if arguments.dry else Scale()
    if arguments.job:
        part, *job = arguments.job
        PARTS[part].run(tuple(job), Results(arguments.out, part, arguments.dry), scale, work)
        return 0
    failed = [] if arguments.draw else measure(arguments, scale, work)
    gpu_report.write(arguments.out, arguments.dry)
    print((arguments.out / "gpu.md").read_text())
    for what in failed:
        print(f"failed: {what}", file=sys.stderr)
    return 1 if failed else 0


def measure(arguments: argparse.Namespace, scale: Scale, work: Path) -> list[str]:
    """Runs the missing jobs, each in a process of its own. Returns the jobs that failed."""
    failed = []
    for part in arguments.parts:
        for job in PARTS[part].jobs(scale):
            if PARTS[part].finished(job, Results(arguments.out, part, arguments.dry), scale):
                continue
            command = [sys.executable, "-m", "benchmarks.gpu.run", "--out", str(arguments.out), "--work", str(work)]
            command += ["--dry"] if arguments.dry else []
            start = time.perf_counter()
            if subprocess.run([*command, "--job", part, *job]).returncode:
                failed.append(f"{part}: {', '.join(job)}")
            print(f"{part}: {', '.join(job)}: {time.perf_counter() - start:.0f} s in all", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
