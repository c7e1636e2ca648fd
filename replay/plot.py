"""The figures of a replay as one picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from histospec.replay import tables as replay_tables
from histospec.replay.result import Group, Options, Replay
from histospec.replay.scores import Score, deciles
from histospec.server.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which remains distinct with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6b6b6b"
OWN = "#bdbdbd"
INK = "#222222"
WIDTH = 12  # columns of the grid that holds the panels


FORMATS = ("png", "pdf", "svg", "jpg", "jpeg", "webp", "tif", "tiff", "eps", "ps")
MISSING = 'a plot needs matplotlib: pip install "histospec[replay]"'


def possible() -> bool:
    """Returns whether matplotlib is installed. Servers do not need it."""
    return find_spec("matplotlib") is not None


def require(target: str) -> None:
    """Checks that a plot can be saved to a file of this name.

    Raises:
        ConfigError: the file name has an unknown ending, or matplotlib is not installed.

    """
    if _format(target) not in FORMATS:
        raise ConfigError(f"--plot {target}: unknown plot format {_format(target)!r}; use {', '.join(FORMATS)}")
    if not possible():
        raise ConfigError(f"--plot {target}: {MISSING}")


def save(figure: "Figure", file: BinaryIO, target: str) -> None:
    """Writes the figure to a file in the format of the target's ending."""
    picture = BytesIO()  # some formats seek
    figure.savefig(picture, format=_format(target))
    file.write(picture.getvalue())


def _format(target: str) -> str:
    return PurePath(target).suffix.removeprefix(".").lower() or "png"


def plot(result: Replay, options: Options, name: str) -> "Figure":
    """Top row: speed-up by epoch, tokens per step, speed-up of each problem. Bottom row: the sweep of the cost,
    the calibration, and, if there are such figures, siblings and sources.
    """  # fmt: skip
    from matplotlib.figure import Figure  # slow to import, and only plots need it
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    below = ["sweep", "calibration"]
    below += ["siblings"] if result.groups else []
    below += ["sources"] if any(score.sources for score in result.last.scores) else []
    rows = [["epochs", "step", "spread"], *([below] if len(below) <= 3 else [below[:2], below[2:]])]
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08)
    figure = Figure(figsize=(13, 4.7 * len(rows)), dpi=150, layout=layout, facecolor="white")
    title = replay_tables.title(result, options, name).replace("$", r"\$")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    panels = figure.subplot_mosaic([_row(names) for names in rows])
    colours = {cost: COLOURS[i % len(COLOURS)] for i, cost in enumerate(options.shown())}
    scores = replay_tables.shown(result, options)

    _plot_epochs(panels["epochs"], result, colours)
    figure.legend(*panels["epochs"].get_legend_handles_labels(), frameon=False, fontsize=9.5, loc="upper right",
                  ncols=len(colours))  # fmt: skip
    _plot_step(panels["step"], scores, colours)
    _plot_spread(panels["spread"], scores, colours)
    _plot_sweep(panels["sweep"], result, colours)
    _plot_calibration(panels["calibration"], scores, colours)
    if "siblings" in panels:
        _plot_siblings(panels["siblings"], result.groups, colours)
    if "sources" in panels:
        _plot_sources(panels["sources"], scores, colours)
    for panel in panels.values():
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        panel.set_axisbelow(True)
    return figure


def _row(names: list[str]) -> list[Any]:
    """Returns panels of equal width, side by side over the whole grid."""
    return [name for name in names for _ in range(WIDTH // len(names))]


def _plot_epochs(axes: "Axes", result: Replay, colours: dict[float, str]) -> None:
    """Plots S_c by epoch, one line per cost, with bootstrap intervals as bars."""
    visits = result.epochs or (result.last,)
    places = np.arange(len(visits))
    apart = 0.25 if len(visits) == 1 else 0.08  # so that bars do not overlap
    for i, (cost, colour) in enumerate(colours.items()):
        scores = [visit.at(cost) for visit in visits]
        values = [score.speed_up() for score in scores]
        reach = np.abs(np.array([score.interval() for score in scores]).T - values)
        shift = places + (i - (len(colours) - 1) / 2) * apart
        axes.errorbar(shift, values, reach, color=colour, marker="o", markersize=5, capsize=0,
                      elinewidth=1.2, linewidth=1.8, label=f"c = {cost:g}")  # fmt: skip
        beside = shift[0] if len(visits) == 1 else places[-1] + 0.08
        axes.annotate(f"{values[-1]:.2f}", (beside, values[-1]), (9, 0), textcoords="offset points", va="center",
                      color=colour, fontsize=10, fontweight="bold")  # fmt: skip
    _plain_decoding(axes)
    axes.set_xticks(places, [replay_tables.label(result, visit) for visit in visits])
    axes.set_xlim(-0.5, len(visits) - 0.35)
    axes.set_ylim(bottom=min(0.9, axes.get_ylim()[0]))
    axes.set_xlabel("epoch of the target")
    axes.set_title("Speed-up $S_c$ by epoch", loc="left", fontsize=11)


def _plot_step(axes: "Axes", scores: Sequence[Score], costs: dict[float, str]) -> None:
    """Plots the mean step of the headline, one bar per cost: its own token, accepted and rejected draft tokens."""
    from matplotlib.patches import Patch

    places = np.arange(len(scores))
    accepted = np.array([score.accepted / score.steps for score in scores])
    rejected = np.array([score.drafted / score.steps for score in scores]) - accepted
    colours = list(costs.values())
    axes.bar(places, 1, width=0.6, color=OWN)
    axes.bar(places, accepted, bottom=1, width=0.6, color=colours)
    axes.bar(places, rejected, bottom=1 + accepted, width=0.6, facecolor="white", edgecolor=colours, hatch="////",
             linewidth=1)  # fmt: skip
    for place, up, down in zip(places, accepted, rejected, strict=True):
        axes.annotate(f"{1 + up:.2f} tokens\n{up + down:.2f} drafted", (place, 1 + up + down), (0, 3), fontsize=9,
                      textcoords="offset points", ha="center", color=GREY)  # fmt: skip
    axes.set_xticks(places, [f"c = {score.verify_cost:g}" for score in scores])
    axes.set_xlim(-0.5, len(scores) - 0.5)
    axes.set_xlabel("cost of a draft token")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.36)
    axes.legend(
        handles=[
            Patch(facecolor="white", edgecolor=GREY, hatch="////", label="draft, rejected"),
            Patch(facecolor=GREY, label="draft, accepted"),
            Patch(facecolor=OWN, label="the step's own token"),
        ],
        frameon=False, fontsize=9, loc="upper right",
    )  # fmt: skip
    axes.set_title("The mean step, in tokens (last visit)", loc="left", fontsize=11)


def _plot_spread(axes: "Axes", scores: Sequence[Score], colours: dict[float, str]) -> None:
    """Plots S_c of each problem of the headline, sorted."""
    for score in scores:
        values = np.sort(score.speed_ups())[::-1]
        edges = np.linspace(0, 100, len(values) + 1)
        axes.stairs(values, edges, baseline=None, color=colours[score.verify_cost], linewidth=1.8)
    _plain_decoding(axes)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of problems with at least this speed-up")
    axes.set_title("Speed-up $S_c$ of each problem (last visit)", loc="left", fontsize=11)


def _plot_sweep(axes: "Axes", result: Replay, colours: dict[float, str]) -> None:
    """Plots S_c over c: drafts made for that c, and as thin lines, drafts made for other costs."""
    scores = sorted(result.last.scores, key=lambda score: score.verify_cost)
    costs = np.array([score.verify_cost for score in scores])
    logarithmic = costs[0] > 0
    room = 1.6 if len(costs) > 1 else 4
    low, high = (costs[0] / room, costs[-1] * room) if logarithmic else (0.0, max(costs[-1], 0.1) * 1.1)
    fine = np.geomspace(low, high, 200) if logarithmic else np.linspace(low, high, 200)
    if result.peer is not None:
        best = [result.peer.best(cost)[1].speed_up(cost) for cost in fine]
        axes.plot(fine, best, color=GREY, linewidth=1.5, linestyle=(0, (4, 2)),
                  label=f"{result.peer.name}, best settings")  # fmt: skip
    for cost, colour in colours.items():
        fixed = [result.last.at(cost).speed_up(other) for other in fine]
        axes.plot(fine, fixed, color=colour, linewidth=1, alpha=0.55)
    values = [score.speed_up() for score in scores]
    axes.plot(costs, values, color=INK, linewidth=2, marker="o", markersize=4, label="drafts made for this c", zorder=3)
    for cost, colour in colours.items():
        axes.plot(cost, result.last.at(cost).speed_up(), color=colour, marker="o", markersize=7, zorder=4)
    axes.plot([], [], color=GREY, linewidth=1, alpha=0.55, label="drafts made for another cost")
    _plain_decoding(axes)
    if logarithmic:
        from matplotlib.ticker import NullLocator

        axes.set_xscale("log")
        round_ones = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5)]
        axes.set_xticks([tick for tick in round_ones if low <= tick <= high])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(low, high)
    axes.set_ylim(max(0, min(0.9, axes.get_ylim()[0])), max(values) * 1.3)
    axes.set_xlabel("c, the cost of verifying a draft token")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.set_title("Speed-up $S_c$ over c (last visit)", loc="left", fontsize=11)


def _plot_calibration(axes: "Axes", scores: Sequence[Score], colours: dict[float, str]) -> None:
    """Plots observed over predicted acceptance by decile. The area of a mark is its share of the verified tokens."""
    axes.fill_between((0, 1), (-0.04, 0.96), (0.04, 1.04), color="#eeeeee", linewidth=0, label="within 4 points")
    axes.plot((0, 1), (0, 1), color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    for score in scores:
        found = deciles(score.verified)
        predicted = [decile.predicted for decile in found]
        observed = [decile.observed for decile in found]
        shares = np.array([decile.tokens for decile in found]) / max(1, len(score.verified.predicted))
        colour = colours[score.verify_cost]
        axes.errorbar(predicted, observed, [decile.margin() for decile in found], color=colour, linewidth=1.2,
                      elinewidth=1, alpha=0.8)  # fmt: skip
        axes.scatter(predicted, observed, s=12 + 320 * shares, color=colour, edgecolor="white", linewidth=0.8, zorder=3,
                     clip_on=False)  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted acceptance")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.annotate("area: share of tokens\nbars: 95 % interval", (0.99, 0.02), xycoords="axes fraction", ha="right",
                  color=GREY, fontsize=9)  # fmt: skip
    axes.set_title("Acceptance by predicted probability (last visit)", loc="left", fontsize=11)


def _plot_siblings(axes: "Axes", groups: Sequence[Group], colours: dict[float, str]) -> None:
    """Plots tokens per step over the number of siblings: filled marks with history, hollow ones without."""
    from matplotlib.lines import Line2D

    shown = [history for history in (True, False) if any(group.history == history for group in groups)]
    for history in shown:
        rows = [group for group in groups if group.history == history]
        style: dict[str, Any] = (
            {"linestyle": "-"} if history else {"linestyle": (0, (4, 2)), "markerfacecolor": "white"}
        )
        for cost, colour in colours.items():
            values = [group.at(cost).tokens_a_step() for group in rows]
            axes.plot(range(len(rows)), values, color=colour, marker="o", markersize=5, linewidth=1.6, **style)
    labels = [
        replay_tables.siblings(group) + (f"\n({group.running():.3g})" if group.running() != group.asked else "")
        for group in groups
        if group.history == shown[0]
    ]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.4, len(labels) - 0.6)
    axes.set_ylim(bottom=min(1, axes.get_ylim()[0]), top=axes.get_ylim()[1] * 1.12)
    smaller = any(group.running() != group.asked for group in groups)
    axes.set_xlabel("siblings that run at the same time" + (" (mean)" if smaller else ""))
    handles = [
        Line2D([], [], color=GREY, marker="o", markersize=5, label="with history"),
        Line2D([], [], color=GREY, marker="o", markersize=5, linestyle=(0, (4, 2)), markerfacecolor="white",
               label="without history"),
    ]  # fmt: skip
    axes.legend(handles=[handles[not history] for history in shown], frameon=False,
                fontsize=9, loc="upper left", ncols=2)  # fmt: skip
    axes.set_title("Tokens per step with running siblings", loc="left", fontsize=11)


def _plot_sources(axes: "Axes", scores: Sequence[Score], colours: dict[float, str]) -> None:
    """Plots draft tokens per step by source, one bar per cost: accepted ones filled, rejected ones hatched."""
    names = list(dict.fromkeys(name for score in scores for name in score.sources))
    width = 0.8 / len(scores)
    for i, score in enumerate(scores):
        places = np.arange(len(names)) + (i - (len(scores) - 1) / 2) * width
        counts = [score.sources.get(name, {"draft_tokens": 0, "accepted_tokens": 0}) for name in names]
        drafted = np.array([count["draft_tokens"] for count in counts]) / score.steps
        accepted = np.array([count["accepted_tokens"] for count in counts]) / score.steps
        colour = colours[score.verify_cost]
        axes.bar(places, accepted, width=width * 0.9, color=colour)
        axes.bar(places, drafted - accepted, bottom=accepted, width=width * 0.9, facecolor="white", edgecolor=colour,
                 hatch="////", linewidth=1)  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.set_title("Draft tokens per step, by source (last visit)", loc="left", fontsize=11)


def _plain_decoding(axes: "Axes") -> None:
    axes.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("no drafts", (0.01, 1), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  color=GREY, fontsize=9)  # fmt: skip
