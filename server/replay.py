"""`histospec replay FILE`: what would a user gain from drafts, judged by rollouts recorded earlier?"""

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from histospec.server import replay_arctic, replay_json, replay_plot, replay_tables
from histospec.server.recordings import Problem, RecordingError, read
from histospec.server.replay_plan import replay
from histospec.server.replay_result import Options

COSTS = (0.02, 0.05, 0.1)

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after `histospec replay`. Returns the exit status: 2 for bad input."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.history is not None and not args.siblings:
        parser.error("--history and --no-history choose rows of the siblings table: add --siblings")
    if args.compare:
        replay_arctic.require()
    options = Options(
        mode=args.mode,
        limit=args.limit,
        seed=args.seed,
        costs=_distinct(args.cost) or COSTS,
        max_tokens=args.max_tokens,
        max_response=args.max_response,
        epochs=args.epochs,
        siblings=_distinct(args.siblings),
        history=(False, True) if args.history is None else (args.history,),
        compare=args.compare == "arctic",
    )
    errors = Console(stderr=True)
    out = errors if args.json == "-" else Console()
    path = Path(args.file)
    try:
        with _progress(errors) as progress:
            result = replay(_load(path, progress), options, progress)
        name = path.name.removesuffix(".gz").removesuffix(".jsonl")
        out.print(replay_tables.report(result, options, name))
        if args.json:
            text = json.dumps(replay_json.as_json(result, options, path.name), indent=2) + "\n"
            if args.json == "-":
                sys.stdout.write(text)
            else:
                Path(args.json).write_text(text, encoding="utf-8")
        if not args.no_plot:
            plot = Path(args.plot or f"{name}.replay.png")
            replay_plot.plot(result, options, name).savefig(plot)
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
        "--verify-cost",
        type=_each(_cost),
        action="append",
        metavar="C,...",
        help="cost of verifying one drafted token, in decoding steps; a list sweeps it (default: 0.02,0.05,0.1)",
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
    parser.add_argument(
        "--siblings",
        type=_each(_siblings),
        action="append",
        metavar="N,...",
        help="let N other members of the target's group run beside it, in step; all = the whole group; "
        "a table of 0,1,3,7,15 shows what each is worth",
    )
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="siblings table: only with, or only without the earlier epochs (default: both)",
    )
    parser.add_argument(
        "--compare", choices=["arctic"], help="also replay with arctic-inference, which must be installed"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every figure as JSON; - is the standard output")
    plots = parser.add_mutually_exclusive_group()
    plots.add_argument(
        "--plot", metavar="PNG", help="where to save the plot (default: FILE's name + .replay.png, here)"
    )
    plots.add_argument("--no-plot", action="store_true", help="save no plot")
    return parser


def _distinct(lists: Sequence[Sequence[T]] | None) -> tuple[T, ...]:
    """What an option that takes lists and may be repeated was given, each value once, in order."""
    return tuple(dict.fromkeys(chain.from_iterable(lists or ())))


def _each(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A parser of comma-separated values."""

    def values(text: str) -> list[T]:
        return [parse(part) for part in text.split(",")]

    values.__name__ = parse.__name__.strip("_")  # argparse names it when a value cannot be read
    return values


def _siblings(text: str) -> int | None:
    """How many; None for all."""
    return None if text == "all" else _count(text)


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
