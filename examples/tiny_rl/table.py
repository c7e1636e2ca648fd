"""The table of a run, which grows on the terminal with each epoch. It fits into 80 columns."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.tiny_rl.results import Epoch

HEADED = box.Box("    \n    \n ─  \n    \n    \n    \n    \n    \n")

COLUMNS = (
    "\nepoch",
    "\ndrafts",
    "\nreward",
    "mean\nlen",
    "tokens\n/ step",
    "ac-\ncepted",
    "request\nsteps",
    "engine\nsteps",
    "\nsec",
    "CPU\nsec",
    "hit\nrate",
)

TERMS = {
    "request steps": "forward passes that gave a request a token, of all requests",
    "tokens / step": "tokens per request step; 1 without drafts",
    "engine steps": "forward passes of the batch; they wait for the slowest request",
    "accepted": "share of the drafted tokens that vLLM accepted",
    "sec": "wall-clock seconds, other programs included",
    "CPU sec": "of this process, without the draft server",
    "hit rate": "share of the new sessions whose problem had a history",
}
"""What the columns count."""


def rows(epoch: Epoch) -> tuple[tuple[str, ...], ...]:
    """Returns the rows of an epoch: without drafts, with drafts and ratios, and with two drafters a row for each."""
    without, drafts = epoch.without, epoch.with_drafts
    of_both = (
        ("", name, "", "", f"+{part.accepted / drafts.request_steps:.2f}", f"{part.acceptance:.0%}", *[""] * 5)
        for name, part in drafts.by_drafter.items()
    )
    return (
        (
            str(epoch.number),
            "without",
            f"{without.reward:.3f}",
            f"{without.length:.0f}",
            f"{without.tokens_per_step:.2f}",
            "",
            str(without.request_steps),
            f"{without.engine_steps}      ",
            f"{without.seconds:.1f}",
            f"{without.cpu_seconds:.1f}      ",
            "",
        ),
        (
            "",
            "with",
            f"{drafts.reward:.3f}",
            f"{drafts.length:.0f}",
            f"[bold]{drafts.tokens_per_step:.2f}[/]",
            f"{drafts.acceptance:.0%}",
            str(drafts.request_steps),
            f"{drafts.engine_steps} [bold green]{epoch.fewer_engine_steps:.2f}x[/]",
            f"{drafts.seconds:.1f}",
            f"{drafts.cpu_seconds:.1f} [green]{epoch.less_cpu:.2f}x[/]",
            f"{epoch.lookups.hit_rate:.0%}",
        ),
        *of_both,
    )


def build(epochs: list[Epoch]) -> Table:
    """Returns the whole table, 80 columns wide."""
    table = Table(*COLUMNS, box=HEADED, padding=0, show_edge=False)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for epoch in epochs:
        for row in rows(epoch):
            table.add_row(*row)
    return table


class Progress:
    """Shows the table and a line with the current activity; without a terminal, one line per epoch."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console, self._live = console, live
        self._epochs: list[Epoch] = []

    def doing(self, text: str) -> None:
        """Shows the current activity."""
        self._live.update(Group(build(self._epochs), Text(f"  {text} ...", style="dim")), refresh=True)

    def add(self, epoch: Epoch) -> None:
        """Adds the rows of an epoch."""
        self._epochs.append(epoch)
        if not self._console.is_terminal:
            self._console.print(
                f"epoch {epoch.number}: {epoch.with_drafts.tokens_per_step:.2f} tokens per step, "
                f"{epoch.fewer_steps:.2f}x fewer steps, reward {epoch.with_drafts.reward:.3f}"
            )
        self._live.update(build(self._epochs), refresh=True)


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """Shows the progress of a run until the block ends."""
    with Live(console=console, auto_refresh=False) as live:
        yield Progress(console, live)


def explain(console: Console, drafter: bool) -> None:
    """Prints what the columns count. `drafter`: there is a draft model."""
    console.print()
    terms = TERMS | ({"history, drafter": "accepted tokens per step, by who drafted them"} if drafter else {})
    console.print(listed(terms.items()), style="dim")


def listed(lines: Iterable[tuple[str, str]]) -> Table:
    """Returns a table with a word and a sentence in each row; a long sentence wraps in its own column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for line in lines:
        grid.add_row(*line)
    return grid
