"""The plots of the study."""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import finish, style, titled
from benchmarks.rl_study.runs import Run, band

EXACT = {"none": "#8a95a1", "ngram": "#c9a227", "suffix": "#e07a1f", "HistoSpec": "#1b6ca8"}
BY_DRAFTER = ["HistoSpec", "HistoSpec auto", "drafter", "HistoSpec + drafter", "HistoSpec + drafter auto"]


def save(found: dict[str, list[Run]], folder: Path) -> None:
    """Draws `rewards.png` and `work.png`, and with such runs `coupled.png` and `drafters.png`, into the folder."""
    lenient = [name for name in found if name.startswith("SPEC-RL")]
    both = [name for name in found if name.startswith("both")]
    coupled = [name for name in found if name.startswith("coupled")]
    exact = [name for name in found if name in EXACT]
    with style():
        figure, (left, right) = _figure("Reward: means of the seeds, with 95 % confidence bands")
        _curves(left, found, exact, "reward", "Exact: without drafts, and with three drafters")
        _curves(right, found, ["none", *lenient], "reward", "SPEC-RL by lenience")
        figure.savefig(folder / "rewards.png", dpi=120)
        figure, (left, right) = _figure("What an epoch takes, and how much of it was there before")
        _curves(left, found, [*exact, *lenient, *both], "steps", "Decoding steps, summed over the responses")
        left.set_yscale("log", nonpositive="mask")
        _curves(right, found, [*lenient, *both], "share_reused", "Share of the tokens that old responses gave")
        right.set_ylim(-0.02, 1.02)
        figure.savefig(folder / "work.png", dpi=120)
        if coupled:
            figure, (left, right) = _figure("Coupled sampling by the share of seeds renewed each epoch")
            shown = ["HistoSpec", *coupled]
            _curves(left, found, shown, "reward", "Reward on the training problems, with their noise", "plasma")
            _curves(right, found, shown, "steps", "Decoding steps, summed over the responses", "plasma")
            right.set_yscale("log", nonpositive="mask")
            figure.savefig(folder / "coupled.png", dpi=120)
        if "drafter" in found:
            figure, (left, right) = _figure("History, a draft model, and both")
            _curves(left, found, BY_DRAFTER, "tokens_per_step", "Tokens per step", "plasma")
            _curves(right, found, ["none", *BY_DRAFTER], "microseconds", "CPU time per token, µs", "plasma")
            figure.savefig(folder / "drafters.png", dpi=120)


def _figure(title: str) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = titled(title, 13, 5.4)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def _curves(
    axes: Axes, found: dict[str, list[Run]], names: list[str], what: str, title: str, shade: str = "viridis"
) -> None:
    shown = [name for name in names if name in found]
    shades = iter(colormaps[shade](np.linspace(0, 0.92, max(1, sum(n not in EXACT for n in shown)))))
    for name in shown:
        middle, half = band(found[name], what)
        epochs = np.arange(1, len(middle) + 1)
        color = EXACT[name] if name in EXACT else next(shades)
        style = "--" if name.startswith("both") else "-"
        axes.plot(epochs, middle, style, color=color, linewidth=2, label=name)
        axes.fill_between(epochs, middle - half, middle + half, color=color, alpha=0.12, linewidth=0)
    axes.set(title=title, xlabel="epoch")
    finish(axes)
    if shown:
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
