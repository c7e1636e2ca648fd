"""Figure and tables of README.md and docs/study-defaults.md, which compare HistoSpec's defaults with vLLM's drafters.

    python -m benchmarks.rl_study.headline            # prints the tables
    python -m benchmarks.rl_study.headline --write    # writes them, and the figure, into README.md and docs/

Draws from runs of run.py: those in FOLDER are whole, those in FOLDER/at-N had N requests at once.
docs/study-defaults.md has the commands of the runs.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.rl_study import tables
from benchmarks.rl_study.methods import METHODS
from benchmarks.rl_study.runs import Run, load, mean
from benchmarks.tables import table

Found = dict[str, list[Run]]
ROOT = Path(__file__).parents[2]
NAMES = {
    "none": "nothing",
    "ngram": "vLLM ngram",
    "suffix": "vLLM suffix",
    "HistoSpec auto": "HistoSpec",
    "coupled 1 auto": "HistoSpec, foreseen noise",
}
"""How the tables and the figure call the methods."""
COLORS = ("#8a95a1", "#c9a227", "#e07a1f", "#2f81f7", "#8957e5")
THEMES = {"light": "#1f2328", "dark": "#e6edf3"}
"""The color of text and lines."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables, or writes tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = Path(__file__).parent / "recorded/defaults"
    parser.add_argument("folder", type=Path, nargs="?", default=recorded, help="the runs (default: the recorded ones)")
    parser.add_argument("--write", action="store_true", help="into the README and its page")
    arguments = parser.parse_args(argv)
    whole = load(arguments.folder, NAMES)
    numbers = sorted(int(part.name.removeprefix("at-")) for part in arguments.folder.glob("at-*"))
    by_number = {number: load(arguments.folder / f"at-{number}", NAMES) for number in numbers}
    headline = methods(whole)
    print(f"{headline}\n{costs(by_number)}")
    if arguments.write:
        tables.insert(headline, ROOT / "README.md")
        tables.insert(f"{headline}\n{costs(by_number)}", ROOT / "docs/study-defaults.md")
        for theme, ink in THEMES.items():
            file = ROOT / f"docs/assets/headline-{theme}.svg"
            draw(whole, ink).savefig(file, transparent=True, metadata={"Date": None})


def methods(found: Found) -> str:
    """Returns the table of whole runs: what drafts save, and that learning stays the same."""
    head = (
        "drafts from", "tokens per step", "decoding steps", "accepted drafts", "CPU seconds of rollouts",
        "of the draft server", "reward at the end", "held out",
    )  # fmt: skip
    rows = []
    for method, runs in found.items():
        drafted, served = any(run.total("drafted") for run in runs), server_seconds(method, runs)
        rows.append(
            (
                NAMES[method],
                f"{tokens_per_step(runs):.2f}",
                f"{mean(run.total('steps') for run in runs)[0]:,.0f}",
                f"{_ratio(runs, 'accepted', 'drafted'):.0%}" if drafted else "",
                f"{mean(run.total('rollout') for run in runs)[0]:.1f}",
                f"{served:.1f}" if served else "",
                *tables.rewards(runs)[1:],
            )
        )
    return table(head, rows)


def server_seconds(method: str, runs: list[Run]) -> float:
    """Returns the CPU time of the draft server; 0 for a method that does not use it."""
    return mean(run.server_seconds for run in runs)[0] if METHODS[method].drafts else 0.0


def costs(by_number: dict[int, Found]) -> str:
    """Returns the table of what a step yields and costs by the number of requests at once, without and with history."""
    head = (
        "drafts from", "requests at once", "epoch", "tokens per step", "drafted tokens per step",
        "CPU time of a step of the engine", "CPU time per token",
    )  # fmt: skip
    rows = [
        (
            name,
            str(number),
            epochs,
            f"{_ratio(runs, 'generated', 'steps'):.2f}",
            f"{_ratio(runs, 'drafted', 'steps'):.1f}",
            f"{1e3 * _ratio(runs, 'rollout', 'engine_steps'):.1f} ms",
            f"{1e6 * _ratio(runs, 'rollout', 'generated'):.0f} µs",
        )
        for method, name in NAMES.items()
        for number, found in by_number.items()
        for epochs, runs in _by_epochs(found[method])
    ]
    return table(head, rows)


def _by_epochs(runs: list[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Yields the runs' first epoch, which has no history, and the others."""
    yield "1", [replace(run, epochs=run.epochs[:1]) for run in runs]
    yield f"2 to {len(runs[0].epochs)}", [replace(run, epochs=run.epochs[1:]) for run in runs]


def tokens_per_step(runs: list[Run]) -> float:
    """Returns the generated tokens per step of a request."""
    return _ratio(runs, "generated", "steps")


def _ratio(runs: list[Run], upper: str, lower: str) -> float:
    return sum(run.total(upper) for run in runs) / sum(run.total(lower) for run in runs)


def draw(found: Found, ink: str) -> Figure:
    """Returns the figure of whole runs: tokens per step, and the CPU time of rollouts and draft server."""
    with rc_context({
        "font.size": 11, "axes.titlelocation": "left", "axes.titlesize": 12, "axes.facecolor": "none",
        "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink,
    }):  # fmt: skip
        figure = Figure(figsize=(10, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        names = [NAMES[method] for method in found]
        tokens = left.barh(names, [tokens_per_step(runs) for runs in found.values()], color=COLORS)
        left.bar_label(tokens, fmt="%.2f", padding=4, color=ink)
        left.set_title("Tokens per decoding step of a request")
        rollouts = [mean(run.total("rollout") for run in runs)[0] for runs in found.values()]
        servers = [server_seconds(*item) for item in found.items()]
        right.barh(names, rollouts, color=COLORS)
        bars = right.barh(names, servers, left=rollouts, color=COLORS, alpha=0.5)
        right.bar_label(
            bars, [f"{sum(both):.0f}" for both in zip(rollouts, servers, strict=True)], padding=4, color=ink
        )
        right.set_title("CPU seconds: rollouts, and draft server (pale)")
        left.invert_yaxis()
        for axes in (left, right):
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(length=0)
            axes.set_xticks([])
            axes.margins(x=0.15)
        return figure


if __name__ == "__main__":
    main()
