"""`histospec replay FILE...`: estimates from recorded rollouts what drafts would gain."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text as Line

from histospec.protocol.limits import MAX_DRAFT
from histospec.replay import arctic as replay_arctic
from histospec.replay import plot as replay_plot
from histospec.replay import tables as replay_tables
from histospec.replay.plan import replay
from histospec.replay.recordings import Recording, RecordingError, grouping, is_regular, names, opened
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.tool_text import Marks, ToolText
from histospec.replay.result import Options, as_json
from histospec.server.arguments import MOST_COST, ArgumentParser, amount, whole
from histospec.server.errors import ConfigError
from histospec.server.output_file import FORCE, is_stdout, keep_apart, written

COSTS = (0.02, 0.05, 0.1)
NAMES = ("prompt", "response", "tokens", "turns", "epoch", "id", "group", "namespace")
"""Field names of a record that is one response."""

T = TypeVar("T")


def main(argv: Sequence[str]) -> int:
    """Runs the command with the arguments after `histospec replay`. Raises HistoSpecError."""
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
    files = names.in_order(args.file)
    names.each_once(files)
    name = names.called(files)
    plot = args.plot
    if plot is None and not args.no_plot and replay_plot.possible():
        plot = f"{name}.replay.png"
    name += f" ({len(files)} files)" if len(files) > 1 else ""
    file = name if len(files) > 1 else names.base(files[0])
    if plot is not None:
        replay_plot.require(plot)
    keep_apart([("--json", args.json), ("--plot", plot)], [("FILE", file) for file in files])
    errors = Console(stderr=True)
    out = errors if any(target and is_stdout(target) for target in (args.json, plot)) else Console()
    with ExitStack() as targets:
        figures, picture = (
            targets.enter_context(written(target, force=args.force)) if target else None for target in (args.json, plot)
        )
        with _progress(errors) as progress:
            tools = ToolText([Marks(*pair) for pair in args.tool_marks or ()], known=not args.no_tool_marks)
            text = Text(args.tokenizer, trusted=args.trust_remote_code, tools=tools)
            recording = Recording(text, args.fields, several=len(files) > 1)
            try:
                _read(files, recording, progress)
                if recording.undated and options.mode == "hist":
                    raise RecordingError(grouping.UNDATED)
                problems = recording.problems()
                notes = [*names.order(files), *recording.notes()]
                result = replay(problems, options, progress)
            except RecordingError as error:
                raise ConfigError(f"{file}: {error}") from None
        for note in notes:
            out.print(Line(note, style="dim"), soft_wrap=True)
        out.print(replay_tables.report(result, options, name))
        if figures is not None:
            shown = json.dumps(as_json(result, options, file, notes), indent=2, allow_nan=False)
            figures.write(f"{shown}\n".encode())
        if picture is not None and plot is not None:
            replay_plot.save(replay_plot.plot(result, options, name), picture, plot)
    if plot is not None:
        out.print(f"plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    elif not args.no_plot:
        out.print(f"no plot: {replay_plot.MISSING}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _read(files: Sequence[str], recording: Recording, progress: Progress) -> None:
    """Adds the files to the recording. The progress bar follows the bytes read, if their number is known."""
    for name, step in zip(files, names.steps(files), strict=True):
        with opened(name) as file:
            known = is_regular(file)
            size = os.fstat(file.fileno()).st_size if known else None
            bar = progress.add_task(f"reading {escape(names.base(name))}", total=size)
            for _ in recording.read(file, name, step):
                if known:
                    progress.update(bar, completed=file.tell())
            progress.remove_task(bar)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="histospec replay",
        description="Estimate what drafts would gain on recorded rollouts. Prints a table and saves a plot.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="+",
        help="recorded rollouts: JSON lines, gzipped or not, or Parquet; - for standard input "
        "(formats: docs/from-your-run-to-a-replay.md)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME_OR_PATH",
        help="the model's tokenizer, for files that hold text: a folder, or a name on the Hugging Face hub",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let code run that comes with the tokenizer")
    marks = parser.add_mutually_exclusive_group()
    marks.add_argument(
        "--tool-marks",
        type=_mark,
        nargs=2,
        action="append",
        metavar=("BEGIN", "END"),
        help="text of a response between these marks was written by tools, not by the model, such as "
        "'<result>' '</result>'; beside the known marks",
    )
    marks.add_argument(
        "--no-tool-marks", action="store_true", help="the model wrote all text of a response, whatever marks are in it"
    )
    parser.add_argument(
        "--fields",
        type=_fields,
        metavar="OURS=YOURS,...",
        help=f"your field names, for records that are one response each; ours are {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--mode",
        choices=["hist", "all"],
        default="hist",
        help="draft from earlier epochs only (hist), or also from the other responses of the same visit (all)",
    )
    parser.add_argument(
        "--cost",
        "--verify-cost",
        type=_each(amount(0, MOST_COST)),
        action="append",
        metavar="C,...",
        help="cost of verifying one draft token, in decoding steps; give a list for a sweep (default: 0.02,0.05,0.1)",
    )
    parser.add_argument(
        "--limit",
        type=whole(0),
        default=60,
        metavar="N",
        help="problems to replay, drawn at random; 0 for all (default: 60)",
    )
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="seed of the draw (default: 1)")
    parser.add_argument(
        "--epochs", type=whole(0), default=10, metavar="N", help="newest epochs to score one by one (default: 10)"
    )
    parser.add_argument(
        "--max-tokens",
        type=whole(1, MAX_DRAFT),
        default=16,
        metavar="N",
        help="maximum tokens of a draft (default: 16)",
    )
    parser.add_argument(
        "--max-response",
        type=whole(1),
        default=2000,
        metavar="N",
        help="maximum tokens of a response to replay (default: 2000)",
    )
    parser.add_argument(
        "--siblings",
        type=_each(_siblings),
        action="append",
        metavar="N,...",
        help="number of other responses of the target's group that run at the same time; all = the whole group; "
        "0,1,3,7,15 makes a table of what each number gains",
    )
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="siblings table: only with, or only without, earlier epochs (default: both)",
    )
    parser.add_argument(
        "--compare", choices=["arctic"], help="also replay with arctic-inference, which must be installed"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every figure as JSON; - for standard output")
    plots = parser.add_mutually_exclusive_group()
    plots.add_argument(
        "--plot", metavar="PNG", help="file for the plot (default: FILE's name + .replay.png in this folder)"
    )
    plots.add_argument("--no-plot", action="store_true", help="save no plot")
    parser.add_argument("--force", action="store_true", help=FORCE)
    return parser


def _distinct(lists: Sequence[Sequence[T]] | None) -> tuple[T, ...]:
    """Returns the values of an option that takes lists and may be repeated, each once, in order."""
    return tuple(dict.fromkeys(chain.from_iterable(lists or ())))


def _each(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Returns a parser of comma-separated values."""

    def values(text: str) -> list[T]:
        return [parse(part) for part in text.split(",")]

    return values


def _fields(text: str) -> Mapping[str, str]:
    """Parses `prompt=question,response=answer`. Returns field names by our names."""
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    wrong = next((ours for ours, theirs in pairs.items() if ours not in NAMES or not theirs), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(
            f"must be such as prompt=question,response=answer, with {', '.join(NAMES)} before the =, is {text[:60]!r}"
        )
    return pairs


def _mark(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _siblings(text: str) -> int | None:
    """Parses a number of siblings; None for all."""
    return None if text == "all" else whole(0)(text)
