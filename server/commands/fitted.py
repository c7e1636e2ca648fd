"""A table that never loses a column: if it is too wide, it stacks the cells of each row."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

LEAST = 12  # cells: a text column has at least this width, or that of its longest word


class Fitted:
    """A table with headings. Only headings and text columns wrap when space is short, and only at words.

    Args:
        headings: of the columns; the first names the rows.
        rows: one text per column.
        text: columns of words, aligned left, which may wrap; the others are numbers.

    """

    def __init__(self, headings: Sequence[str], rows: Iterable[Sequence[Text]], text: Iterable[int] = (0,)) -> None:
        self._headings = headings
        self._rows = list(rows)
        self._text = set(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        for narrow in (False, True):
            table = self._table(narrow)
            needs = Measurement.get(console, options.update(max_width=10_000), table)
            if (needs.minimum if narrow else needs.maximum) <= options.max_width:
                yield table
                return
        yield from self._stacked()

    def _table(self, narrow: bool) -> Table:
        table = Table(*(self._column(number, narrow) for number in range(len(self._headings))), box=box.SIMPLE_HEAD,
                      pad_edge=False, collapse_padding=True)  # fmt: skip
        for row in self._rows:
            table.add_row(*row)
        return table

    def _column(self, number: int, narrow: bool) -> Column:
        heading, cells = self._headings[number], [row[number] for row in self._rows]
        words = max(map(cell_len, heading.split()), default=0)
        if number in self._text:
            longest = max((cell_len(word) for cell in cells for word in cell.plain.split()), default=0)
            return Column(heading, min_width=max(words, min(LEAST, longest)), overflow="fold")
        least = max(words, max((cell.cell_len for cell in cells), default=0))
        # rich would shrink every column that may wrap below its minimum, and cut the last one off.
        return Column(heading, justify="right", width=least if narrow else None, min_width=least, overflow="fold")

    def _stacked(self) -> RenderResult:
        if self._headings[0]:
            yield Text(self._headings[0], "underline")
        for name, *cells in self._rows:
            yield Text.assemble(name, style="bold")
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(overflow="fold")
            grid.add_column(overflow="fold")
            for heading, cell in zip(self._headings[1:], cells, strict=True):
                if cell:
                    grid.add_row(heading, cell)
            yield Padding(grid, (0, 0, 0, 2), expand=False)
        yield ""
