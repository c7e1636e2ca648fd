"""Computes how many shards N GPUs need: `python -m benchmarks.scale.run [--gpus N ...] [--measure FILE] [--costs
FILE]`.

docs/scale.md has its tables. benchmarks/README.md explains each column.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.scale.measure import measure
from benchmarks.scale.model import Costs, Figures, Fit, Plan, fit, paused_steps
from benchmarks.scale.simulation import Outcome, Surroundings, cheapest_shards, fewest_shards, simulate
from histospec.server.machine import drafting_threads

GIB = 1 << 30
PROBLEMS = {10: 1_000, 100: 8_000, 1_000: 32_000, 10_000: 128_000}
"""Default number of problems of the data set, by number of GPUs."""


@dataclass(frozen=True)
class Row:
    """A layout for a plan.

    Attributes:
        plan: the whole plan.
        layout: description of the layout.
        cells: number of separate services, each for an equal share of the GPUs.
        shards: shards per cell.
        outcome: simulated outcome of a cell.

    """

    plan: Plan
    layout: str
    cells: int
    shards: int
    outcome: Outcome


def main() -> None:
    """Measures if asked to, and prints the tables."""
    args = _arguments()
    costs, warm = Costs(), Surroundings().warm
    if args.measure:
        args.measure.write_text(json.dumps(measure(args.rounds, args.quick), indent=1) + "\n")
    if (file := args.costs or args.measure) and not args.quick:
        measured = json.loads(file.read_text())
        if not all("answer_ms" in m for m in measured):
            raise SystemExit(f"{file}: answer_ms: is missing; measure again, an earlier version wrote this file")
        kept = [m for m in measured if not held_out(m)]
        fitted = fit(kept, drafting_threads(args.cores))
        costs, warm = fitted.costs, fitted.warm
        _print_fit(fitted, kept)
        _print_validation(fitted, [m for m in measured if held_out(m)], args.cores)
    costs = Costs(*(value / args.faster for value in dataclasses.astuple(costs)))
    told = {name: value for name in _options() if (value := getattr(args, name)) is not None}
    gpus = [10] if args.quick else args.gpus
    plans = [Plan(gpus=n, **({"problems": PROBLEMS.get(n, 100 * n)} | told)) for n in gpus]
    around = Surroundings(deadline_ms=args.deadline, threads=args.threads, warm=warm)
    rows = []
    print(
        f"\n{'GPUs':>6}  {'layout':<32}{'shards':>7}{'messages':>9}{'busy':>6}{'hottest':>8}{'p50':>9}{'p99':>9}"
        f"{'late':>7}{'waits':>7}{'cores':>8}{'ingest':>8}{'GiB':>8}{'up':>10}{'down':>10}"
    )
    for plan in plans:
        for row in layouts(plan, args.cell, args.gpu_cores, costs, around):
            rows.append(row)
            _print_row(row, costs)
    if args.plot:
        from benchmarks.scale.plot import plot

        plot(args.plot, replace(plans[0], gpus=args.cell), costs, around, rows)


def _options() -> dict[str, type]:
    """Returns the options of a plan and their types."""
    return {field.name: type(field.default) for field in dataclasses.fields(Plan) if field.name != "gpus"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(PROBLEMS), metavar="N", help="10 to 10,000")
    for name, kind in _options().items():
        default = "by GPUs" if name == "problems" else str(getattr(Plan(), name))
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"({default})")
    parser.add_argument("--cell", type=int, default=8, metavar="N", help="GPUs per cell (8)")
    parser.add_argument("--faster", type=float, default=1.0, metavar="X", help="divide all costs by this (1)")
    parser.add_argument(
        "--gpu-cores", type=float, default=50.0, metavar="N", help="how many cores cost as much as a GPU (50)"
    )
    parser.add_argument("--deadline", type=float, default=20.0, metavar="MS", help="deadline of a step (20)")
    parser.add_argument(
        "--measure", type=Path, metavar="FILE", help="measure on this machine, and write the results to this file"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of the measurement (3)")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="fit the costs to a file of --measure")
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="of the measured machine (this)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="--threads of the shards in the tables (2)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to check that it runs; the figures mean nothing"
    )
    args = parser.parse_args()
    for name in (*_options(), "cell", "faster", "gpu_cores", "deadline", "rounds", "cores", "threads"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be above 0, is {value}")
    if min(args.gpus) < 1:
        parser.error(f"--gpus: must be at least 1, is {min(args.gpus)}")
    return args


def layouts(plan: Plan, cell: int, gpu_cores: float, costs: Costs, around: Surroundings) -> Iterator[Row]:
    """Yields layouts with the fewest and the cheapest number of shards: one service, and cells of some GPUs each."""
    parts = [("one service", plan.gpus, around)]
    if cell < plan.gpus:
        parts += [(f"cells of {cell}", cell, around)]
        parts += [(f"cells of {cell}, lockstep", cell, replace(around, lockstep=True))]
    for name, gpus, surroundings in parts:
        cells = -(-plan.gpus // gpus)
        # The cost of steps does not depend on the number of problems, so all sizes have the same cells.
        found = _shards(replace(plan, gpus=gpus, problems=1), gpu_cores, costs, surroundings)
        for kind, (shards, outcome) in found.items():
            yield Row(plan, f"{name}, {kind}", cells, shards, outcome)


@cache
def _shards(part: Plan, gpu_cores: float, costs: Costs, around: Surroundings) -> dict[str, tuple[int, Outcome]]:
    fewest = fewest_shards(part, costs, around)
    return {"fewest": fewest, "cheapest": cheapest_shards(part, fewest, costs, gpu_cores, around)}


def _print_row(row: Row, costs: Costs) -> None:
    plan, outcome, shards = row.plan, row.outcome, row.cells * row.shards
    up, down = plan.network(row.shards)
    print(
        f"{plan.gpus:6,}  {row.layout:<32}{shards:7,}{plan.messages(row.shards):9.1f}"
        f"{outcome.busy.mean():6.0%}{outcome.busy.max():8.0%}"
        f"{outcome.percentile(50):6.1f} ms{outcome.percentile(99):6.1f} ms{outcome.late:7.2%}{outcome.waiting:7.1%}"
        f"{outcome.cores * row.cells:8,.1f}{plan.ingest_cores(costs):8,.1f}"
        f"{plan.memory() / shards / GIB:8.2f}{up / 1e6:7,.0f} MB{down / 1e6:7,.0f} MB",
        flush=True,
    )


def _print_fit(fitted: Fit, measured: Sequence[Figures]) -> None:
    print("costs, microseconds; of an ingested token, nanoseconds")
    for name, value in dataclasses.asdict(fitted.costs).items():
        print(f"  {name:<16}{value:12,.2f}")
    for name in ("steps", "answers", "clients", "ingests"):
        off = getattr(fitted, name)
        print(f"  {name}: off by {np.median(np.abs(off)):.0%} (median), {np.abs(off).max():.0%} at most")
    print(f"  a message without a pause before it costs {fitted.warm:.0%} of that")
    print(
        f"\n{'shards':>6}{'workers':>9}{'batch':>7}{'siblings':>10}{'draft':>7}{'messages':>10}{'CPU':>12}{'fitted':>9}"
    )
    for m, off in zip(paused_steps(measured), fitted.steps, strict=True):
        print(
            f"{m['shards']:6}{m['workers']:9}{m['batch']:7}{m['siblings']:10}{m['max_tokens']:7}"
            f"{m['messages_per_step']:10.2f}{m['server_cpu_ms_per_step']:9.2f} ms{off:+9.0%}"
        )


def held_out(m: Figures) -> bool:
    """Returns whether the model is checked with this measurement and not fitted to it: the full batch of a GPU."""
    return m["steps"] > 1 and (m["batch"], m["siblings"], m["max_tokens"]) == (256, 16, 16)


def _print_validation(fitted: Fit, measured: Sequence[Figures], cores: int) -> None:
    """Prints a table of simulated and measured results, for runs that were not fitted."""
    print(f"\n{'shards':>6}{'workers':>9}{'p50':>12}{'simulated':>12}{'off':>6}{'CPU':>9}{'simulated':>12}{'off':>6}")
    for m in sorted(measured, key=lambda m: (m["shards"], m["workers"])):
        outcome, plan = simulated(m, fitted, cores)
        steps_per_second = plan.gpus * 1e3 / (plan.step_ms + float(outcome.millis.mean()))
        p50, cpu = outcome.percentile(50), 1e3 * outcome.cores / steps_per_second
        print(
            f"{m['shards']:6}{m['workers']:9}{m['step_p50_ms']:9.2f} ms{p50:9.2f} ms{p50 / m['step_p50_ms'] - 1:+6.0%}"
            f"{m['server_cpu_ms_per_step']:6.2f} ms{cpu:9.2f} ms{cpu / m['server_cpu_ms_per_step'] - 1:+6.0%}"
        )


def simulated(m: Figures, fitted: Fit, cores: int) -> tuple[Outcome, Plan]:
    """Simulates a measured run, with workers and shards on the cores of one machine."""
    plan = Plan(
        gpus=round(m["workers"]),
        sequences=round(m["batch"]),
        siblings=round(m["siblings"]),
        step_ms=max(1.0, 1e3 / m["worker_steps_per_second"] - m["step_p50_ms"]),
        drafted=m["drafted_per_step"],
    )
    # The workers of `histospec bench` start together, and each starts a step every `interval`.
    threads = drafting_threads(cores)
    around = Surroundings(
        deadline_ms=1e3, network_ms=0, lockstep=True, threads=threads, warm=fitted.warm, cores=cores, in_vllm=False
    )
    return simulate(plan, round(m["shards"]), fitted.costs, around, 400), plan


if __name__ == "__main__":
    main()
