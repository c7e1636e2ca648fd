"""Tables of a service's state, for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from histospec.native import SOURCES
from histospec.server.observability.shard_health import SERVING

LEAST = 12  # cells: a text column has at least this width, or that of its longest word
COLOURS = {"bad": "red", "warn": "yellow", "info": "blue"}

Row = list[Text]


class Fitted:
    """A table that never loses a column: if it is too wide, it stacks the cells of each row.

    Only headings and text columns wrap when space is short, and only at words.

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


def shard_table(shards: Iterable[tuple[str, str, str]]) -> Fitted:
    """Returns a table of names, addresses and health."""
    rows = [
        [plain(name), plain(address), plain(health, "green" if health == SERVING else "red")]
        for name, address, health in shards
    ]
    return Fitted(["shard", "address", "health"], rows, text=(0, 1, 2))


def numbers(status: Mapping[str, Any]) -> Group:
    """Returns the tables for the `/status` of one shard."""
    parts: list[RenderableType] = [
        plain(status["shard"], "bold"),
        *(_hint(hint) for hint in status["hints"]),
        Fitted(["", "last ten minutes", "since the start"], _counted(status)),
        Fitted(["now", ""], _contents(status)),
    ]
    if status["namespaces"]:
        parts += [Text("Speed-up by run", "bold"), _gains(status["namespaces"])]
        parts += [_why(row) for row in status["namespaces"] if row["why_not_more"]]
        parts.append(_namespaces(status["namespaces"]))
    if status["lines"]:
        parts.append(_lines(status["lines"]))
    return Group(*parts)


def plain(text: object, style: str = "") -> Text:
    """Returns a text from another machine without markup and terminal escapes."""
    return Text("".join(c if c.isprintable() else "�" for c in str(text)), style)


def _hint(hint: Mapping[str, str]) -> Padding:
    text = plain(f"● {hint['title']}. ", COLOURS.get(hint["level"], ""))
    return Padding(text.append_text(plain(hint["text"], "default")), (0, 0, 0, 2), expand=False)


def _counted(status: Mapping[str, Any]) -> list[Row]:
    """Returns rows of counters: the last ten minutes, and since the start."""
    totals, recent = status["totals"], status["recent"]
    rows = [_share_row("cache hit rate (sessions)", status, "lookups_hit", ("lookups_hit", "lookups_miss"))]
    if totals["twins_hit"] + totals["twins_miss"]:
        rows.append(
            _share_row("sessions with a seed that have a twin", status, "twins_hit", ("twins_hit", "twins_miss"))
        )
    rows.append(
        _row("tokens per step", *(_known(status["gains"][when]["tokens_per_step"]) for when in ("recent", "totals")))
    )
    rows.append(_share_row("draft tokens accepted", status, "accepted_tokens", ("draft_tokens",)))
    for source in SOURCES:
        if source not in ("twin", "model") or totals[f"{source}.draft_tokens"]:
            accepted, drafted = f"{source}.accepted_tokens", f"{source}.draft_tokens"
            name = "of the workers' own drafter" if source == "model" else f"  of {source}"
            rows.append(_share_row(name, status, accepted, (drafted,)))
    for what, name in {
        "tokens generated": "generated_tokens",
        "  in steps without a draft": "undrafted_tokens",
        "tokens stored": "ingested_tokens",
        "responses evicted: memory full": "evicted_by_memory",
        "  by --history-epochs": "evicted_by_epochs",
        "  by --history-responses": "evicted_by_responses",
        "responses too old to keep": "too_old_responses",
        "store errors": "store_errors",
    }.items():
        rows.append(_row(what, f"{recent[name]:,.0f}", f"{totals[name]:,.0f}"))
    if recent["draft_p50"] is not None:
        rows.append(_row("draft time, p50", _milliseconds(recent["draft_p50"]), ""))
        rows.append(_row("draft time, p99", _milliseconds(recent["draft_p99"]), ""))
    return rows


def _contents(status: Mapping[str, Any]) -> list[Row]:
    totals = status["totals"]
    rows = [
        _row("open sessions", f"{totals['sessions']:,.0f} on {totals['streams']:,.0f} streams"),
        _row("tokens of history", f"{totals['history_tokens']:,.0f}"),
        _row("index", f"{_mib(totals['index_bytes'])} of {_mib(status['memory_bytes'])}"),
    ]
    used, limit = status.get("store_bytes"), status.get("store_limit_bytes")
    free, size = status.get("disk_free_bytes"), status.get("disk_size_bytes")
    if used is not None:
        rows.append(_row("store", _mib(used) if limit is None else f"{_mib(used)} of {_mib(limit)}"))
    if free is not None and size is not None:
        rows.append(_row("free on the disk of the store", f"{_mib(free)} of {_mib(size)}"))
    return rows


def _gains(namespaces: Iterable[Mapping[str, Any]]) -> Fitted:
    """Returns the gain of each run: a row for the last ten minutes, and one since the start."""
    headings = [
        "run", "when", "speed-up", "tokens per step", "accepted", "empty drafts", "cache hit rate",
        "verify cost",
    ]  # fmt: skip
    rows = []
    for row in namespaces:
        for when, words in (("recent", "10 min"), ("totals", "total")):
            gain = row["gains"][when]
            speedup = "-" if gain["speedup"] is None else f"{gain['speedup']:.2f}x"
            shares = (_known(gain[name], ".0%") for name in ("acceptance", "empty", "known"))
            cost = _known(row["verify_cost"]) if when == "recent" else ""
            figures = (words, speedup, _known(gain["tokens_per_step"]), *shares, cost)
            rows.append([plain(row["name"]), *map(Text, figures)])
    return Fitted(headings, rows, text=(0, 1))


def _why(row: Mapping[str, Any]) -> Padding:
    text = plain(f"{row['name']}: main limit: {row['why_not_more']}.")
    return Padding(text, (0, 0, 0, 2), expand=False)


def _namespaces(rows: Iterable[Mapping[str, Any]]) -> Fitted:
    columns = ("sessions", "problems", "history_responses", "history_tokens", "newest_epoch")
    return Fitted(
        ["namespace", "sessions", "problems", "responses", "tokens", "newest epoch"],
        [[plain(row["name"]), *(Text(f"{row[name]:,.0f}") for name in columns)] for row in rows],
    )


def _lines(lines: Iterable[Mapping[str, str]]) -> Fitted:
    rows = []
    for line in lines:
        text = f"{line['event']} ({line['details']})" if line["details"] else line["event"]
        colour = "yellow" if line["level"] == "warning" else "red"
        rows.append([plain(line["time"]), plain(line["level"], colour), plain(text)])
    return Fitted(["time", "level", "recent warnings and errors"], rows, text=(0, 1, 2))


def _row(what: str, *figures: str) -> Row:
    return [Text(what), *map(Text, figures)]


def _share_row(what: str, status: Mapping[str, Any], part: str, whole: Iterable[str]) -> Row:
    """Returns a row for counter `part` as a share of the sum of the counters `whole`."""
    return _row(what, *(_share(c[part], sum(c[name] for name in whole)) for c in (status["recent"], status["totals"])))


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f} ({part / whole:.0%})" if whole else "none"


def _known(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mib(number: float) -> str:
    return f"{number / (1 << 20):,.1f} MiB"
