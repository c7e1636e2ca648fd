"""How a service is doing, for a terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from histospec.native import SOURCES
from histospec.server.observability.shard_health import SERVING

COLOURS = {"bad": "red", "warn": "yellow", "info": "blue"}

Counters = Mapping[str, float]


def shard_table(shards: Iterable[tuple[str, str, str]]) -> Table:
    """Name, address and health of each."""
    table = Table("shard", "address", "health")
    for name, address, health in shards:
        colour = "green" if health == SERVING else "red"
        table.add_row(plain(name), plain(address), plain(health, colour))
    return table


def numbers(status: Mapping[str, Any]) -> Group:
    """What one shard says of itself, as `/status` answers it."""
    parts: list[RenderableType] = [
        Text(f"\n{plain(status['shard'])}", "bold"),
        *(_hint(hint) for hint in status["hints"]),
    ]
    parts.append(_counters(status))
    if status["namespaces"]:
        parts.append(_namespaces(status["namespaces"]))
    if status["lines"]:
        parts.append(_lines(status["lines"]))
    return Group(*parts)


def plain(text: object, style: str = "") -> Text:
    """A text from elsewhere: no markup, and nothing that a terminal would obey."""
    return Text("".join(c if c.isprintable() else "�" for c in str(text)), style)


def _hint(hint: Mapping[str, str]) -> Padding:
    text = plain(f"● {hint['title']}. ", COLOURS.get(hint["level"], ""))
    return Padding(text.append_text(plain(hint["text"], "default")), (0, 0, 0, 2))


def _counters(status: Mapping[str, Any]) -> Table:
    totals, recent = status["totals"], status["recent"]
    table = Table("", "last ten minutes", "since the start")
    for column in table.columns[1:]:
        column.justify = "right"
    for what, show in {
        "sessions opened on a known problem": lambda c: _share(c["lookups_hit"], c["lookups_hit"] + c["lookups_miss"]),
        "sessions with a seed that have a twin": lambda c: _share(c["twins_hit"], c["twins_hit"] + c["twins_miss"]),
        "tokens a step": lambda c: _ratio(c["generated_tokens"], c["drafts_hit"] + c["drafts_empty"]),
        "drafted tokens accepted": lambda c: _share(c["accepted_tokens"], c["draft_tokens"]),
        **{f"  of {source}": _source(source) for source in SOURCES},
        "tokens generated": lambda c: f"{c['generated_tokens']:,.0f}",
        "tokens stored": lambda c: f"{c['ingested_tokens']:,.0f}",
        "responses evicted": lambda c: f"{c['evicted_responses']:,.0f}",
        "store errors": lambda c: f"{c['store_errors']:,.0f}",
    }.items():
        table.add_row(what, show(recent), show(totals))
    table.add_section()
    if recent["draft_p50"] is not None:
        table.add_row("time to draft, median", _milliseconds(recent["draft_p50"]), "")
        table.add_row("time to draft, 99th percentile", _milliseconds(recent["draft_p99"]), "")
    table.add_row("open sessions", "", f"{totals['sessions']:,.0f} on {totals['streams']:,.0f} streams")
    table.add_row("tokens of history", "", f"{totals['history_tokens']:,.0f}")
    table.add_row("index", "", f"{_mib(totals['index_bytes'])} of {_mib(status['memory_bytes'])}")
    return table


def _source(source: str) -> Any:
    return lambda c: _share(c[f"{source}.accepted_tokens"], c[f"{source}.draft_tokens"])


def _namespaces(rows: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(
        Column("namespace", min_width=16, overflow="fold"),
        "sessions",
        "problems",
        "responses",
        "tokens",
        "known",
        "accepted",
        "newest epoch",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        known = _percent(row["lookups_hit"], row["lookups_hit"] + row["lookups_miss"])
        counts = (f"{row[name]:,.0f}" for name in ("sessions", "problems", "history_responses", "history_tokens"))
        accepted = _percent(row["accepted_tokens"], row["draft_tokens"])
        table.add_row(plain(row["name"]), *counts, known, accepted, f"{row['newest_epoch']:,.0f}")
    return table


def _lines(lines: Iterable[Mapping[str, str]]) -> Table:
    table = Table("time", "level", "recent warnings and errors")
    for line in lines:
        text = f"{line['event']} ({line['details']})" if line["details"] else line["event"]
        table.add_row(
            plain(line["time"]), plain(line["level"], "yellow" if line["level"] == "warning" else "red"), plain(text)
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f} ({part / whole:.0%})" if whole else "none"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _mib(number: float) -> str:
    return f"{number / (1 << 20):,.1f} MiB"
