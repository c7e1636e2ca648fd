"""The plot of a run: how much drafts save, and the rewards with and without them."""

import math
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from examples.tiny_rl.results import Epoch, Side

WITH, FIRST, WITHOUT, ENGINE, TIME = "#1b6ca8", "#8fbbdc", "#8a95a1", "#e07a1f", "#4d8b57"


def save(epochs: list[Epoch], title: str, path: Path) -> None:
    """Draws the run to `path` (PNG)."""
    with rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.titlepad": 12}):
        figure = Figure(figsize=(13, 4.6), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        panels = figure.subplots(1, 3)
        for axes, draw in zip(panels, (_tokens_a_step, _ratios, _rewards), strict=True):
            draw(axes, epochs)
            axes.set_xlabel("epoch")
            axes.set_xlim(epochs[0].number - 0.5, epochs[-1].number + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.25)
            axes.set_axisbelow(True)
        figure.savefig(path, dpi=150)


def _tokens_a_step(axes: Axes, epochs: list[Epoch]) -> None:
    values = [epoch.with_drafts.tokens_per_step for epoch in epochs]
    colors = [FIRST] + [WITH] * (len(epochs) - 1)
    bars = axes.bar(_numbers(epochs), values, color=colors, width=0.65)
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axhline(1, color="white", linewidth=1.5, linestyle="--")
    axes.axhline(1, color=WITHOUT, linewidth=1.5, linestyle="--", label="without drafts")
    axes.bar(0, 0, color=FIRST, label="first visit: siblings and other problems")
    axes.bar(0, 0, color=WITH, label="later visits: earlier responses, too")
    axes.set_ylim(0, max(values) * 1.5)
    axes.set_title("Tokens per step of a request")
    axes.legend(frameon=False, loc="upper left")


def _ratios(axes: Axes, epochs: list[Epoch]) -> None:
    lines = (
        ("steps, summed over the requests", WITH, [epoch.fewer_request_steps for epoch in epochs]),
        ("steps of the engine (the whole batch)", ENGINE, [epoch.fewer_engine_steps for epoch in epochs]),
        ("seconds", TIME, [epoch.faster for epoch in epochs]),
    )
    for name, color, values in lines:
        axes.plot(_numbers(epochs), values, color=color, marker="o", linewidth=2, label=name)
    axes.axhline(1, color=WITHOUT, linewidth=1.5, linestyle="--", label="without drafts")
    axes.set_ylim(0, max(max(values) for *_, values in lines) * 1.5)
    axes.set_title("How many times fewer with drafts")
    axes.legend(frameon=False, loc="upper left")


def _rewards(axes: Axes, epochs: list[Epoch]) -> None:
    sides = (
        ("with drafts (these rollouts train)", WITH, -0.06, [epoch.with_drafts for epoch in epochs]),
        ("without drafts, same weights", WITHOUT, 0.06, [epoch.without for epoch in epochs]),
    )
    for name, color, shift, values in sides:
        axes.errorbar(
            [number + shift for number in _numbers(epochs)],
            [side.reward for side in values],
            yerr=[_standard_error(side) for side in values],
            color=color,
            marker="o",
            linewidth=2,
            capsize=3,
            label=name,
        )
    axes.set_ylim(0, 1.2)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_title("Mean reward and its standard error")
    axes.legend(frameon=False, loc="upper left")


def _numbers(epochs: list[Epoch]) -> list[int]:
    return [epoch.number for epoch in epochs]


def _standard_error(side: Side) -> float:
    """Returns the standard error of the mean reward for these problems, from the spread within each group."""
    variance = 0.0
    for group in side.rewards:
        mean = sum(group) / len(group)
        variance += sum((r - mean) ** 2 for r in group) / (len(group) - 1) / len(group)
    return math.sqrt(variance) / len(side.rewards)
