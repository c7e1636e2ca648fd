"""The series of every run, as text: nearly all of /metrics if there are many namespaces.

prometheus_client creates an object for each sample and escapes labels one by one, for 9,500 samples per scrape. Here,
the lines of a family form one template that changes only when labels change, so a scrape just fills in numbers.
prometheus_client renders all other metrics, and tests compare its text with this one.

A run is a namespace, and each series names it twice. `namespace` is the name that clients use. But if the scrape
configuration adds a target label `namespace`, as the Prometheus operator does, Prometheus renames ours to
`exported_namespace`. Nothing renames `run`, so alerts and the dashboard use that.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.native import AGES, COUNTERS, SOURCES
from histospec.server.observability.engine_counters import COUNTED, EngineCounters

MAX_LABELS = 256
"""Clients choose namespaces, and each label value costs a scraper memory for as long as it keeps the series."""
OTHER = "_other"
"""The label that all namespaces without their own label share."""

Rows = NDArray[np.int64]


class Labels:
    """Gives labels to namespaces: first come, first served. Not thread-safe; `rows` receives readings in order.

    A namespace keeps its label until it is dropped. Then the label is free for the one that has waited longest. All
    others share OTHER, which also counts what a dropped namespace counted after the last reading.

    No counter of OTHER ever falls. A namespace that gets a label after it was counted there begins with its own
    counters, and OTHER keeps its counts up to then.
    """

    def __init__(self, most: int = MAX_LABELS) -> None:
        self._most = most
        self._waiting: dict[str, None] = {}
        """The namespaces without a label, in the order of their first reading."""
        self._labelled: dict[str, Rows] = {}
        """The last reading of each namespace with a label, in the columns COUNTED."""
        self._moved: Rows = np.zeros(len(COUNTED), np.int64)
        """What labelled namespaces counted under OTHER, less what those that are gone counted under their labels."""

    def rows(self, now: EngineCounters) -> tuple[list[str], Rows]:
        """Returns the names to show for a reading, and one row for each, in the columns of EngineCounters.

        The last name is OTHER if a namespace has no label or something was counted there.
        """
        index = {name: number for number, name in enumerate(now.namespaces)}
        counted = now.numbers(COUNTED)
        for name, last in list(self._labelled.items()):
            if name in index:  # a lower count: dropped and created again
                self._moved -= np.where(now.values[index[name], counted] < last, last, 0)
            else:
                self._moved -= last
                del self._labelled[name]
        self._waiting = {name: None for name in self._waiting if name in index}
        # Two series of one name would break the scrape, so no namespace gets the label OTHER.
        known = self._labelled.keys() | self._waiting.keys() | {OTHER}
        new = dict.fromkeys(name for name in index if name not in known)
        self._waiting |= new
        for name in list(self._waiting)[: self._most - len(self._labelled)]:
            del self._waiting[name]
            self._labelled[name] = row = now.values[index[name], counted]
            if name not in new:
                self._moved += row
        names = list(self._labelled)
        rows = now.values[[index[name] for name in names]]
        self._labelled = dict(zip(names, rows[:, counted], strict=True))

        other = now.values.sum(axis=0) - rows.sum(axis=0)
        other[counted] += now.dropped[counted] + self._moved
        if len(names) == len(index) and not other.any():
            return names, rows
        return [*names, OTHER], np.vstack((rows, other))


class Family(NamedTuple):
    """The metrics of one name."""

    name: str
    """Without the suffix `_total` of counters."""
    kind: str
    help: str
    series: list[tuple[dict[str, str], str]]
    """For each run: the labels besides those that name it, and the column of EngineCounters."""


VERIFY_COST = Family(
    "histospec_verify_cost",
    "gauge",
    "Cost of verifying a draft token, in decoding steps without drafts: the median over open streams.",
    [({}, "verify_costs")],
)


def _families() -> list[Family]:
    families: dict[str, Family] = {}
    for column, name, label, value, text in COUNTERS:
        family = families.setdefault(name, Family(f"histospec_{name}", "counter", text, []))
        family.series.append(({label: value} if label else {}, column))
    sources = ", ".join(SOURCES)
    for name, text, label, values, number in (
        ("source_draft_tokens",
         "Draft tokens, by the source with the longest match, the twin, or the workers' own drafter (model): "
         f"{sources}.",
         "source", SOURCES, "draft_tokens"),
        ("source_accepted_tokens", "Accepted draft tokens, by source.",
         "source", SOURCES, "accepted_tokens"),
        ("age_draft_tokens",
         "Tokens drafted from history, by the number of epochs between the response and the namespace's newest epoch.",
         "age", AGES, "draft_tokens"),
        ("age_accepted_tokens", "Accepted tokens drafted from history, by age in epochs.",
         "age", AGES, "accepted_tokens"),
    ):  # fmt: skip
        series = [({label: value}, f"{value}.{number}") for value in values]
        families[name] = Family(f"histospec_{name}", "counter", text, series)
    text = "Memory of each namespace in the index."
    return [*families.values(), Family("histospec_namespace_bytes", "gauge", text, [({}, "bytes")])]


FAMILIES = _families()
SERIES_OF_A_RUN = sum(len(family.series) for family in (*FAMILIES, VERIFY_COST))
"""The maximum number of series per label at /metrics."""


class RunSeries:
    """Renders the series in Prometheus formats. Not thread-safe; see Labels for the order of calls."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._names: list[str] = []
        self._templates = [""] * len(FAMILIES)

    def text(self, now: EngineCounters, open_metrics: bool) -> Iterator[str]:
        """Yields one family at a time, in the OpenMetrics or the Prometheus format."""
        names, values = self._labels.rows(now)
        if names != self._names:
            self._templates = [_template(family, names) for family in FAMILIES]
            self._names = names
        for family, template in zip(FAMILIES, self._templates, strict=True):
            columns = now.numbers(column for _, column in family.series)
            yield _head(family, open_metrics) + template % tuple(values[:, columns].ravel("F").tolist())
        costs = _costs(now.verify_costs, names)
        lines = (f"{_series(VERIFY_COST, {}, name)} {cost!r}\n" for name, cost in costs.items())
        yield _head(VERIFY_COST, open_metrics) + "".join(lines)


def _costs(reported: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """Returns the cost by label; the median if several namespaces share a label."""
    costs: dict[str, list[float]] = {}
    labelled = set(names)
    for name, cost in reported.items():
        costs.setdefault(name if name in labelled else OTHER, []).append(cost)
    return {name: median(some) for name, some in costs.items()}


def _head(family: Family, open_metrics: bool) -> str:
    name = _name(family, family.kind == "counter" and not open_metrics)
    return f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"


def _template(family: Family, names: list[str]) -> str:
    """Returns a line for each series and name, with %d in place of its number."""
    lines = [f"{_series(family, labels, name)} ".replace("%", "%%") for labels, _ in family.series for name in names]
    return "".join(f"{line}%d\n" for line in lines)


def _series(family: Family, labels: Mapping[str, str], run: str) -> str:
    pairs = sorted({**labels, "namespace": run, "run": run}.items())
    text = ",".join(f'{key}="{_escaped(value)}"' for key, value in pairs)
    return f"{_name(family, family.kind == 'counter')}{{{text}}}"


def _name(family: Family, total: bool) -> str:
    return f"{family.name}_total" if total else family.name


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
