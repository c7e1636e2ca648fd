"""Draws the picture of docs/scale.md."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import matplotlib as mpl

from benchmarks.scale.model import Costs, Plan
from benchmarks.scale.simulation import Outcome, Surroundings, tried

mpl.use("Agg")
from matplotlib import pyplot as plt

SHARDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


class Layout(Protocol):
    """A row of the table of run.py."""

    @property
    def plan(self) -> Plan:
        """The load."""

    @property
    def layout(self) -> str:
        """How, in words."""

    @property
    def cells(self) -> int:
        """Number of separate services."""

    @property
    def shards(self) -> int:
        """Of each."""


def plot(file: Path, cell: Plan, costs: Costs, around: Surroundings, rows: Iterable[Layout]) -> None:
    """Draws two panels. Left: the needs of all sizes. Right: the effect of more shards on one cell."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    lines: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        lines.setdefault(row.layout, []).append((row.plan.gpus, row.cells * row.shards))
    for (name, points), marker in zip(lines.items(), "osv^Dx", strict=False):
        left.plot([gpus for gpus, _ in points], [shards / gpus for gpus, shards in points], marker=marker, label=name)
    left.set(xscale="log", ylim=(0, None), xlabel="GPUs", ylabel="shards a GPU", title="Shards that N GPUs need")
    left.grid(which="both", alpha=0.25)
    left.legend(fontsize=8, loc="upper right")

    outcomes: list[Outcome] = [tried(cell, shards, costs, around) for shards in SHARDS]
    together = [tried(cell, shards, costs, replace(around, lockstep=True)) for shards in SHARDS]
    for found, colour, name in ((outcomes, "tab:blue", ""), (together, "tab:red", ", in lockstep")):
        right.plot(SHARDS, [o.percentile(50) for o in found], "-", color=colour, label=f"step, p50{name}")
        right.plot(SHARDS, [o.percentile(99) for o in found], "--", color=colour, label=f"step, p99{name}")
    right.axhline(around.deadline_ms, color="black", linewidth=0.8, label="deadline")
    right.set(xlabel=f"shards of a cell of {cell.gpus} GPUs", ylabel="milliseconds", title="What more shards bring")
    right.set_ylim(0, 2.2 * around.deadline_ms)
    cores = right.twinx()
    cores.plot(SHARDS, [o.cores for o in outcomes], ":", color="tab:green", label="cores busy (right)")
    cores.set(ylabel="cores", ylim=(0, 2.2 * max(o.cores for o in outcomes)))
    lines_right = [*right.get_lines(), *cores.get_lines()]
    right.legend(lines_right, [str(line.get_label()) for line in lines_right], fontsize=8, ncols=2, loc="upper right")
    right.grid(alpha=0.25)
    figure.savefig(file, dpi=110)
    plt.close(figure)
