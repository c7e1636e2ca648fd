"""The series that every run has, as text: nearly all of /metrics where there are many namespaces.

prometheus_client makes an object of each sample and escapes its labels one by one, for 9,500 samples at each scrape.
Here the lines of a family are one template, which changes only when labels change, so that a scrape fills in numbers.
All other metrics are prometheus_client's, and tests compare this text with its own.

A run is a namespace, and each series names it twice. `namespace` is what clients call it; but where a scrape gives its
targets a label `namespace`, as the Prometheus operator does, Prometheus renames ours to `exported_namespace`. Nothing
renames `run`, so alerts and dashboard go by that.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from histospec.native import AGES, COUNTERS, SOURCES
from histospec.server.observability.engine_counters import EngineCounters
from histospec.server.observability.labels import OTHER_NAMESPACES, Labels


class Family(NamedTuple):
    """Metrics of one name."""

    name: str
    """Without the `_total` of a counter."""
    kind: str
    help: str
    series: list[tuple[dict[str, str], str]]
    """Of each run: the labels beside those that name it, and the column of EngineCounters."""


VERIFY_COST = Family(
    "histospec_verify_cost",
    "gauge",
    "What verifying a drafted token costs, in plain decoding steps: the median of what open streams last said.",
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
         "Tokens drafted, by the source that knew the longest context, the twin, or the workers' own drafter (model): "
         f"{sources}.",
         "source", SOURCES, "draft_tokens"),
        ("source_accepted_tokens", "Drafted tokens that the sessions then generated, by that source.",
         "source", SOURCES, "accepted_tokens"),
        ("age_draft_tokens",
         "Tokens drafted from history, by how many epochs older than the newest of the namespace the response is.",
         "age", AGES, "draft_tokens"),
        ("age_accepted_tokens", "Of these, the tokens that the sessions then generated.",
         "age", AGES, "accepted_tokens"),
    ):  # fmt: skip
        series = [({label: value}, f"{value}.{number}") for value in values]
        families[name] = Family(f"histospec_{name}", "counter", text, series)
    held = "Memory that each namespace holds in the index."
    return [*families.values(), Family("histospec_namespace_bytes", "gauge", held, [({}, "bytes")])]


FAMILIES = _families()
SERIES_OF_A_RUN = sum(len(family.series) for family in (*FAMILIES, VERIFY_COST))
"""How many series /metrics has of each label, at most."""


class RunSeries:
    """Says them as Prometheus reads them. Not thread-safe; see Labels for the order of calls."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._names: list[str] = []
        self._templates = [""] * len(FAMILIES)

    def text(self, now: EngineCounters, open_metrics: bool) -> Iterator[str]:
        """A family at a time, in the OpenMetrics format or in Prometheus' own."""
        names, values = self._labels.show(now)
        if names != self._names:
            self._templates = [_template(family, names) for family in FAMILIES]
            self._names = names
        for family, template in zip(FAMILIES, self._templates, strict=True):
            columns = now.numbers(column for _, column in family.series)
            yield _head(family, open_metrics) + template % tuple(values[:, columns].ravel("F").tolist())
        costs = _costs(now.verify_costs, names)
        lines = (f"{_series(VERIFY_COST, {}, name)} {cost!r}\n" for name, cost in costs.items())
        yield _head(VERIFY_COST, open_metrics) + "".join(lines)


def _costs(said: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """By label: the median where several namespaces share it."""
    costs: dict[str, list[float]] = {}
    labelled = set(names)
    for name, cost in said.items():
        costs.setdefault(name if name in labelled else OTHER_NAMESPACES, []).append(cost)
    return {name: median(some) for name, some in costs.items()}


def _head(family: Family, open_metrics: bool) -> str:
    name = _name(family, family.kind == "counter" and not open_metrics)
    return f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"


def _template(family: Family, names: list[str]) -> str:
    """A line for each series and name, with %d where its number belongs."""
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
