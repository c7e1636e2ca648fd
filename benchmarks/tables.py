"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; every line ends with a newline."""
    return heading(head) + "".join(map(line, rows))


def heading(head: Sequence[str]) -> str:
    """Returns the first two lines of a table."""
    return line(head) + "|---" * len(head) + "|\n"


def line(cells: Sequence[str]) -> str:
    """Returns a row."""
    return f"| {' | '.join(cells)} |\n"
