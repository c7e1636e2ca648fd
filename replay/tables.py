"""The figures of a replay as tables for a terminal."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from histospec.replay.result import Group, Options, Replay, Visit
from histospec.replay.scores import Score, deciles

KNOWN = {"hist": "earlier epochs", "all": "earlier epochs and siblings"}
ENOUGH = 500  # observations for a meaningful decile of the calibration
NOTE = """\
c: cost of verifying one draft token, in decoding steps without drafts; the engine drafts less at a higher c.
S_c = tokens / sum over steps (1 + c * drafted): the speed-up at that cost over decoding without drafts.
95 % interval: how much S_c varies with the drawn problems (bootstrap)."""


def report(result: Replay, options: Options, name: str) -> RenderableType:
    """Returns all tables, the headline's first."""
    parts: list[RenderableType] = [
        Text(title(result, options, name), style="bold"),
        _epochs(result),
        Text(NOTE, style="dim"),
    ]
    if result.groups:
        parts += ["", *_siblings(result, options)]
    if result.peer is not None:
        parts += ["", *_peer(result)]
    if any(score.sources for score in result.last.scores):
        parts += ["", *_sources(result, options)]
    parts += ["", *_calibration(result, options)]
    return Lines(*parts)


def title(result: Replay, options: Options, name: str) -> str:
    """Returns a line about what was replayed, short enough for the plot."""
    shown = name if len(name) <= 40 else f"{name[:37]}..."
    return f"{shown}: {len(result.last.cases)} of {result.usable} problems, drafts from {KNOWN[options.mode]}"


def label(result: Replay, visit: Visit) -> str:
    """Returns the name of a visit: its epoch, if it has one."""
    if visit.epoch is not None:
        return str(visit.epoch)
    same = [str(other.epoch) for other in result.epochs if result.is_last(other)]
    return f"{same[0]} (last)" if same else "last visit"


def per_cent(part: float, whole: float) -> str:
    """Returns `part` as a share of `whole`, or a dash if `whole` is 0."""
    return f"{part / whole:.0%}" if whole else "-"


def _table(*headings: str, left: int = 1) -> Table:
    """Returns a table with `left` columns aligned left, the others aligned right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return table


def _epochs(result: Replay) -> Table:
    """Returns the epochs from top to bottom, the headline last. The headline's epoch appears only once."""
    table = _table("epoch", "problems", "cost\nc", "tokens\nper step", "drafted\nper step", "accepted", "speed-up\nS_c",
                   "95 %\ninterval")  # fmt: skip
    for visit in [visit for visit in result.epochs if not result.is_last(visit)] + [result.last]:
        heads: tuple[str, str] = label(result, visit), str(len(visit.cases))
        for score in visit.scores:
            low, high = score.interval()
            table.add_row(
                *heads,
                f"{score.verify_cost:g}",
                f"{score.tokens_a_step():.3f}",
                f"{score.drafted_a_step():.3f}",
                per_cent(score.accepted, score.drafted),
                f"{score.speed_up():.3f}",
                f"{low:.2f}-{high:.2f}",
                style="bold" if visit.epoch is None else None,
            )
            heads = "", ""
        table.add_section()
    return table


def _siblings(result: Replay, options: Options) -> list[RenderableType]:
    """Returns the siblings table: numbers of siblings from top to bottom, without history left, with it right."""
    columns = [history for history in (False, True) if history in options.history]
    headings = ["\n\ncost\nc", "\n\nsiblings\nasked", "\n\n\nran"]
    for history in columns:
        known = "with" if history else "without"
        headings += [f"{known}\nhistory:\ntokens\nper step", "\n\nof the\ngroup", "\n\n\nS_c"]
    table = _table(*headings)
    rows = {(group.asked, group.history): group for group in result.groups}
    for cost in options.shown():
        head = f"{cost:g}"
        for asked in options.siblings:
            groups = [rows[asked, history] for history in columns]
            cells = [siblings(groups[0]), f"{groups[0].running():.3g}"]
            for score in (group.at(cost) for group in groups):
                cells += [
                    f"{value:.3f}" for value in (score.tokens_a_step(), score.group_tokens_a_step(), score.speed_up())
                ]
            table.add_row(head, *cells)
            head = ""
        table.add_section()
    return [
        Text("Siblings that run at the same time as the target (last visit)", style="bold"),
        table,
        Text("\n".join(_siblings_notes(result)), style="dim"),
    ]


def siblings(group: Group) -> str:
    """Returns the requested number of siblings."""
    return "all" if group.asked is None else str(group.asked)


def _siblings_notes(result: Replay) -> list[str]:
    notes = ["tokens per step, S_c: of the targets, the same in every row; of the group: of targets and siblings."]
    notes += [
        f"{group.smaller()} of {len(group.cases)} groups have fewer than {group.asked} siblings: all of theirs ran."
        for group in {group.asked: group for group in result.groups}.values()
        if group.smaller()
    ]
    return notes


def _peer(result: Replay) -> list[RenderableType]:
    """Returns the comparison of the headline with the other drafter at its best setting for each cost."""
    assert result.peer is not None
    table = _table("cost\nc", f"{result.peer.name}\nS_c", "tokens\nper step", "min token\nprob", "max spec\nfactor",
                   "HistoSpec\nS_c", "gain")  # fmt: skip
    for score in result.last.scores:
        settings, best = result.peer.best(score.verify_cost)
        theirs = best.speed_up(score.verify_cost)
        table.add_row(
            f"{score.verify_cost:g}",
            f"{theirs:.3f}",
            f"{best.tokens_a_step():.3f}",
            f"{settings.min_token_prob:g}",
            f"{settings.max_spec_factor:g}",
            f"{score.speed_up():.3f}",
            f"{score.speed_up() / theirs - 1:+.1%}",
            style="bold",
        )
    return [
        Text(f"The same targets with {result.peer.name}, at its best settings for each cost", style="bold"),
        table,
    ]


def _sources(result: Replay, options: Options) -> list[RenderableType]:
    """Returns the draft tokens and acceptance of each source."""
    table = _table("cost\nc", "source", "drafted\nper step", "share", "accepted\nper step", "share", "accepted", left=2)
    for score in shown(result, options):
        head = f"{score.verify_cost:g}"
        drafted = sum(counts["draft_tokens"] for counts in score.sources.values())
        accepted = sum(counts["accepted_tokens"] for counts in score.sources.values())
        for name, counts in score.sources.items():
            table.add_row(
                head,
                name,
                f"{counts['draft_tokens'] / score.steps:.3f}",
                per_cent(counts["draft_tokens"], drafted),
                f"{counts['accepted_tokens'] / score.steps:.3f}",
                per_cent(counts["accepted_tokens"], accepted),
                per_cent(counts["accepted_tokens"], counts["draft_tokens"]),
            )
            head = ""
        table.add_section()
    return [
        Text("Contribution of each source (last visit)", style="bold"),
        table,
        Text("A draft token counts for the source with the longest match for it.", style="dim"),
    ]


def _calibration(result: Replay, options: Options) -> list[RenderableType]:
    """Returns the calibration by decile of predicted probability, one column group per cost; dim if data is scarce."""
    scores = shown(result, options)
    headings = [f"c = {score.verify_cost:g}\n{heading}" for score in scores for heading in ("tokens", "off by")]
    table = _table("predicted", *headings)
    for i in range(10):
        cells: list[Any] = []
        for score in scores:
            decile = next((d for d in deciles(score.verified) if round(d.low * 10) == i), None)
            style = "dim" if decile is None or decile.tokens < ENOUGH else ""
            off = "-" if decile is None else f"{100 * (decile.observed - decile.predicted):+.1f}"
            cells += [Text("0" if decile is None else f"{decile.tokens:,}", style), Text(off, style)]
        table.add_row(f"{i / 10:.1f}-{(i + 1) / 10:.1f}", *cells)
    note = f"off by: accepted minus predicted, in points; deciles with fewer than {ENOUGH} tokens are unreliable."
    return [
        Text("Calibration: verified draft tokens by predicted acceptance (last visit)", style="bold"),
        table,
        Text(note, style="dim"),
    ]


def shown(result: Replay, options: Options) -> Sequence[Score]:
    """Returns the headline's scores that get details."""
    return [result.last.at(cost) for cost in options.shown()]
