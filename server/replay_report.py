"""A replay's figures for people (table, plot) and for programs (JSON)."""

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from histospec.server.replay_scores import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from histospec.server.replay import Options, Replay, Visit

KNOWN = {"hist": "earlier epochs", "all": "earlier epochs and siblings"}
# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#6b6b6b"
OWN = "#bdbdbd"
NOTE = """\
c: what verifying one drafted token costs, in plain decoding steps; the engine drafts less where c is higher.
S_c = tokens / sum over steps (1 + c * drafted): the speed-up over plain decoding at that cost.
95 % interval: how far S_c moves when other problems are drawn (bootstrap)."""


def table(result: "Replay", options: "Options", name: str) -> RenderableType:
    """Epochs from top to bottom, the headline last."""
    rows = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    rows.add_column("epoch", no_wrap=True)
    for heading in (
        "problems",
        "cost\nc",
        "tokens\na step",
        "drafted\na step",
        "accepted",
        "speed-up\nS_c",
        "95 %\ninterval",
    ):
        rows.add_column(heading, justify="right", no_wrap=True)
    for visit in _visits(result):
        label, problems = _label(result, visit), str(len(visit.cases))
        for score in visit.scores:
            low, high = score.interval()
            rows.add_row(
                label,
                problems,
                f"{score.verify_cost:g}",
                f"{score.tokens / score.steps:.3f}",
                f"{score.drafted / score.steps:.3f}",
                f"{score.accepted / score.drafted:.0%}" if score.drafted else "-",
                f"{score.speed_up():.3f}",
                f"{low:.2f}-{high:.2f}",
                style="bold" if visit.epoch is None else None,
            )
            label = problems = ""
        rows.add_section()
    return Group(Text(_title(result, options, name), style="bold"), rows, Text(NOTE, style="dim"))


def as_json(result: "Replay", options: "Options", file: str) -> dict[str, Any]:
    """Every figure of the replay; docs/replay.md explains the fields."""
    return {
        "file": file,
        "mode": options.mode,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "max_response": options.max_response,
        "problems": result.problems,
        "problems_with_history": result.usable,
        "last_visit": _visit_json(result.last, options),
        "epochs": [{"epoch": visit.epoch, **_visit_json(visit, options)} for visit in result.epochs],
    }


def _visit_json(visit: "Visit", options: "Options") -> dict[str, Any]:
    return {
        "problems": len(visit.cases),
        "history_tokens": sum(case.history_tokens() for case in visit.cases),
        "target_tokens": sum(case.target_tokens() for case in visit.cases),
        "costs": [_score_json(score, options) for score in visit.scores],
    }


def _score_json(score: Score, options: "Options") -> dict[str, Any]:
    return {
        "verify_cost": score.verify_cost,
        "steps": score.steps,
        "drafted": score.drafted,
        "accepted": score.accepted,
        "tokens_per_step": score.tokens / score.steps,
        "drafted_per_step": score.drafted / score.steps,
        "speed_up": score.speed_up(),
        "speed_up_95": list(score.interval()),
        "speed_up_at": {f"{cost:g}": score.speed_up(cost) for cost in options.costs},
    }


def plot(result: "Replay", options: "Options", name: str) -> "Figure":
    """Three panels: speed-up by epoch, what a step consists of, and how evenly the problems gain."""
    from matplotlib.figure import Figure  # slow to import, and not everyone wants a plot

    figure = Figure(figsize=(13, 4.8), dpi=150, layout="constrained", facecolor="white")
    figure.suptitle(
        _title(result, options, name).replace("$", r"\$"), x=0.01, ha="left", fontsize=12, fontweight="bold"
    )
    by_epoch, step, spread = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _plot_epochs(by_epoch, result)
    figure.legend(frameon=False, fontsize=9.5, loc="upper right", ncols=len(result.last.scores))
    _plot_step(step, result)
    _plot_spread(spread, result)
    for axes in (by_epoch, step, spread):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def _plot_epochs(axes: "Axes", result: "Replay") -> None:
    """S_c against the epoch, a line a cost, with the bootstrap interval as a band."""
    visits = result.epochs or (result.last,)
    places = np.arange(len(visits))
    for i, score in enumerate(result.last.scores):
        scores = [visit.scores[i] for visit in visits]
        values = [score.speed_up() for score in scores]
        low, high = np.array([score.interval() for score in scores]).T
        colour = COLOURS[i % len(COLOURS)]
        shift = places + (i - (len(result.last.scores) - 1) / 2) * 0.08  # so that the bars do not hide one another
        axes.errorbar(shift, values, [values - low, high - values], color=colour, marker="o", markersize=5, capsize=0,
                      elinewidth=1.2, linewidth=1.8, label=f"c = {score.verify_cost:g}")  # fmt: skip
        axes.annotate(f"{values[-1]:.2f}", (places[-1] + 0.08, values[-1]), (9, 0), textcoords="offset points",
                      va="center", color=colour, fontsize=10, fontweight="bold")  # fmt: skip
    _plain_decoding(axes)
    axes.set_xticks(places, [_label(result, visit) for visit in visits])
    axes.set_xlim(-0.5, len(visits) - 0.35)
    axes.set_ylim(bottom=min(0.9, axes.get_ylim()[0]))
    axes.set_xlabel("epoch of the target")
    axes.set_title("Speed-up $S_c$ by epoch", loc="left", fontsize=11)


def _plot_step(axes: "Axes", result: "Replay") -> None:
    """The mean step of the headline, a bar a cost: its own token, accepted and rejected drafted tokens."""
    from matplotlib.patches import Patch

    scores = result.last.scores
    places = np.arange(len(scores))
    accepted = np.array([score.accepted / score.steps for score in scores])
    rejected = np.array([score.drafted / score.steps for score in scores]) - accepted
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(scores))]
    axes.bar(places, 1, width=0.6, color=OWN)
    axes.bar(places, accepted, bottom=1, width=0.6, color=colours)
    axes.bar(places, rejected, bottom=1 + accepted, width=0.6, facecolor="white", edgecolor=colours, hatch="////",
             linewidth=1)  # fmt: skip
    for place, up, down in zip(places, accepted, rejected, strict=True):
        axes.annotate(f"{1 + up:.2f} tokens\n{up + down:.2f} drafted", (place, 1 + up + down), (0, 3), fontsize=9,
                      textcoords="offset points", ha="center", color=GREY)  # fmt: skip
    axes.set_xticks(places, [f"c = {score.verify_cost:g}" for score in scores])
    axes.set_xlim(-0.5, len(scores) - 0.5)
    axes.set_xlabel("cost of a drafted token")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.36)
    axes.legend(
        handles=[
            Patch(facecolor="white", edgecolor=GREY, hatch="////", label="drafted, rejected"),
            Patch(facecolor=GREY, label="drafted, accepted"),
            Patch(facecolor=OWN, label="the step's own token"),
        ],
        frameon=False, fontsize=9, loc="upper right",
    )  # fmt: skip
    axes.set_title("The mean step, in tokens (last visit)", loc="left", fontsize=11)


def _plot_spread(axes: "Axes", result: "Replay") -> None:
    """S_c of each problem of the headline, sorted: how evenly the gain is spread."""
    for i, score in enumerate(result.last.scores):
        values = np.sort(score.speed_ups())[::-1]
        edges = np.linspace(0, 100, len(values) + 1)
        axes.stairs(values, edges, baseline=None, color=COLOURS[i % len(COLOURS)], linewidth=1.8)
    _plain_decoding(axes)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of problems that gain at least this much")
    axes.set_title("Speed-up $S_c$ of each problem (last visit)", loc="left", fontsize=11)


def _plain_decoding(axes: "Axes") -> None:
    axes.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("plain decoding", (0.01, 1), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  color=GREY, fontsize=9)  # fmt: skip


def _visits(result: "Replay") -> list["Visit"]:
    """The epochs, then the headline; an epoch that is the headline is not shown twice."""
    return [visit for visit in result.epochs if not result.is_last(visit)] + [result.last]


def _label(result: "Replay", visit: "Visit") -> str:
    if visit.epoch is not None:
        return str(visit.epoch)
    same = [str(other.epoch) for other in result.epochs if result.is_last(other)]
    return f"{same[0]} (last)" if same else "last visit"


def _title(result: "Replay", options: "Options", name: str) -> str:
    shown = name if len(name) <= 40 else f"{name[:37]}..."  # the plot has room for one line
    return f"{shown}: {len(result.last.cases)} of {result.usable} problems, drafts from {KNOWN[options.mode]}"
