"""`histospec replay FILE`: what would a user gain from drafts, judged by rollouts recorded earlier?

Two questions are answered. The headline: every problem at its last visit. By epoch: the same problems at each visit,
with only what had come before it, which shows how fast the history begins to pay.
"""

import argparse
import io
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from histospec.server import replay_report, replay_scores
from histospec.server.recordings import Problem, RecordingError, read
from histospec.server.replay_scores import Case, Score

COSTS = (0.02, 0.05, 0.1)


@dataclass(frozen=True)
class Options:
    """How to replay; every figure follows from these and the file."""

    mode: str
    limit: int
    seed: int
    costs: tuple[float, ...]
    max_tokens: int
    max_response: int
    epochs: int


@dataclass(frozen=True)
class Visit:
    """Cases that are replayed together, and what they gave, one score a cost.

    Attributes:
        epoch: the visit that the cases are taken from; None for each problem's last visit.
        cases: one a problem that was visited then and had something to know.
        scores: in the order of the costs.

    """

    epoch: int | None
    cases: tuple[Case, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Replay:
    """The result: the headline over every problem's last visit, and the epochs one by one, oldest first.

    Attributes:
        problems: how many the file holds.
        usable: how many of them have history at their last visit; the cases are drawn from these.
        last: the headline.
        epochs: the visits that could be scored.

    """

    problems: int
    usable: int
    last: Visit
    epochs: tuple[Visit, ...]

    def is_last(self, visit: Visit) -> bool:
        """Whether the visit is every problem's last one, so that its figures are the headline's."""
        return visit.scores is self.last.scores


def replay(problems: Sequence[Problem], options: Options, progress: Progress) -> Replay:
    """Score the problems as the options say, showing each pass on the progress bar.

    Raises:
        RecordingError: no problem has anything that its last visit could have drafted from.

    """

    def cases_at(chosen: Iterable[Problem], epoch: int | None) -> list[tuple[Problem, Case]]:
        pairs = []
        for problem in chosen:
            visit = problem.epochs()[-1] if epoch is None else epoch
            siblings = options.mode == "all"
            case = replay_scores.case_at(problem, visit, siblings=siblings, max_response=options.max_response)
            if case is not None:
                pairs.append((problem, case))
        return pairs

    usable = cases_at(problems, None)
    order = np.random.default_rng(options.seed).permutation(len(usable))
    drawn = [usable[i] for i in order[: options.limit or None]]
    if not any(case.target_tokens() for _, case in drawn):
        raise RecordingError(
            "no problem has a generated response with an earlier one to draft from: record at least two epochs"
            + ("" if options.mode == "all" else ", or count the responses of the same visit with --mode all")
        )
    chosen = [problem for problem, _ in drawn]
    last = tuple(case for _, case in drawn)
    epochs = sorted({epoch for problem in chosen for epoch in problem.epochs()})
    by_epoch = {epoch: tuple(case for _, case in cases_at(chosen, epoch)) for epoch in epochs}
    by_epoch = {epoch: cases for epoch, cases in by_epoch.items() if any(case.target_tokens() for case in cases)}
    recent = sorted(by_epoch)[-options.epochs :] if options.epochs else []
    # Where every problem was last visited at the same epoch, that epoch is the headline: one pass serves both.
    same = {problem.epochs()[-1] for problem in chosen}
    shared = next(iter(same)) if len(same) == 1 else None

    targets = len(last) + sum(len(by_epoch[epoch]) for epoch in recent if epoch != shared)
    bar = progress.add_task("replaying", total=targets * len(options.costs))

    def scored(epoch: int | None, cases: tuple[Case, ...]) -> Visit:
        scores = []
        for cost in options.costs:
            name = "last visit" if epoch is None else f"epoch {epoch}"
            progress.update(bar, description=f"replaying {name} at cost {cost:g}")
            scores.append(replay_scores.score(cases, cost, options.max_tokens, lambda: progress.advance(bar)))
        return Visit(epoch, cases, tuple(scores))

    visits = [scored(epoch, by_epoch[epoch]) for epoch in recent if epoch != shared]
    headline = scored(None, last)
    if shared in recent:
        visits.append(Visit(shared, last, headline.scores))
    return Replay(len(problems), len(usable), headline, tuple(visits))


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after `histospec replay`. Returns the exit status: 2 for bad input."""
    args = _parser().parse_args(argv)
    options = Options(
        mode=args.mode,
        limit=args.limit,
        seed=args.seed,
        costs=tuple(dict.fromkeys(args.cost or COSTS)),
        max_tokens=args.max_tokens,
        max_response=args.max_response,
        epochs=args.epochs,
    )
    errors = Console(stderr=True)
    out = errors if args.json == "-" else Console()
    path = Path(args.file)
    try:
        with _progress(errors) as progress:
            result = replay(_load(path, progress), options, progress)
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        out.print(replay_report.table(result, options, name))
        if args.json:
            text = json.dumps(replay_report.as_json(result, options, path.name), indent=2) + "\n"
            if args.json == "-":
                sys.stdout.write(text)
            else:
                Path(args.json).write_text(text, encoding="utf-8")
        if not args.no_plot:
            plot = Path(args.plot or f"{name}.replay.png")
            replay_report.plot(result, options, name).savefig(plot)
            out.print(f"plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    except RecordingError as error:
        errors.print(f"histospec replay: {path}: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        errors.print(
            f"histospec replay: {where}{error.strerror or error}", markup=False, highlight=False, soft_wrap=True
        )
        return 2
    return 0


def _load(path: Path, progress: Progress) -> list[Problem]:
    """Every problem of the file; the bar follows the bytes read."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        bar = progress.add_task(f"reading {escape(path.name)}", total=size or None)
        problems = list(read(progress.wrap_file(io.BufferedReader(file), task_id=bar)))
        progress.remove_task(bar)
    return problems


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="histospec replay",
        description="What would drafts gain on these recorded rollouts? Prints a table and saves a plot.",
    )
    parser.add_argument("file", metavar="FILE", help="recorded rollouts, .jsonl or .jsonl.gz (format: docs/replay.md)")
    parser.add_argument(
        "--mode",
        choices=["hist", "all"],
        default="hist",
        help="draft from earlier epochs only (hist), or also from the other responses of the same visit (all)",
    )
    parser.add_argument(
        "--cost",
        type=_cost,
        action="append",
        metavar="C",
        help="cost of verifying one drafted token, in decoding steps; may be repeated (default: 0.02 0.05 0.1)",
    )
    parser.add_argument(
        "--limit",
        type=_count,
        default=60,
        metavar="N",
        help="problems to replay, drawn at random; 0 = all (default: 60)",
    )
    parser.add_argument("--seed", type=_count, default=1, metavar="N", help="of the draw (default: 1)")
    parser.add_argument(
        "--epochs", type=_count, default=10, metavar="N", help="newest epochs to score one by one (default: 10)"
    )
    parser.add_argument(
        "--max-tokens", type=_positive, default=16, metavar="N", help="longest draft, in tokens (default: 16)"
    )
    parser.add_argument(
        "--max-response",
        type=_positive,
        default=2000,
        metavar="N",
        help="replay this many tokens of a response (default: 2000)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every figure as JSON; - is the standard output")
    plots = parser.add_mutually_exclusive_group()
    plots.add_argument(
        "--plot", metavar="PNG", help="where to save the plot (default: FILE's name + .replay.png, here)"
    )
    plots.add_argument("--no-plot", action="store_true", help="save no plot")
    return parser


def _cost(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a cost: a number of decoding steps, 0 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value
