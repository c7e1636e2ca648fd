"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table; its last line ends in a newline, too."""
    return heading(head) + "".join(map(line, rows))


def heading(head: Sequence[str]) -> str:
    """Its first two lines."""
    return line(head) + "|---" * len(head) + "|\n"


def line(cells: Sequence[str]) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |\n"
