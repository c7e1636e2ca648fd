"""What Prometheus reads: the engine's own counters at the moment of a scrape, and what the RPCs count."""

import heapq
from collections.abc import Iterator, Mapping
from itertools import accumulate
from statistics import median
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from histospec.native import AGES, COUNTERS, SOURCES, Engine
from histospec.server.history.counts import LOOKUPS, Counts
from histospec.server.observability.connections import CLOSED
from histospec.server.observability.verify_costs import VerifyCosts

# A label value costs memory in every scraper for as long as it is kept, and clients choose namespaces: so many have a
# label of their own, the others share one. A label becomes free when its namespace is dropped.
MAX_NAMESPACE_LABELS = 256
OTHER_NAMESPACES = "_other"

# 20 ms, the deadline of a step unless told otherwise, is a limit of its own: alerts ask how many came later.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

BY_SOURCE = {
    "histospec_source_draft_tokens": (
        f"Tokens drafted, by the source that knew the longest context, or the twin: {', '.join(SOURCES)}.",
        "draft_tokens",
    ),
    "histospec_source_accepted_tokens": (
        "Drafted tokens that the sessions then generated, by that source.",
        "accepted_tokens",
    ),
}
BY_AGE = {
    "histospec_age_draft_tokens": (
        "Tokens drafted from history, by how many epochs older than the newest of the namespace the response is.",
        "draft_tokens",
    ),
    "histospec_age_accepted_tokens": (
        "Of these, the tokens that the sessions then generated.",
        "accepted_tokens",
    ),
}


class EngineCounters(NamedTuple):
    """What the engine counted and holds at one moment, by namespace."""

    namespaces: list[str]
    columns: dict[str, int]
    """Where each number stands in a row; those by source and age are named `source.number`."""
    values: NDArray[np.int64]
    """A row for each namespace."""
    dropped: NDArray[np.int64]
    """What dropped namespaces had counted."""
    verify_costs: dict[str, float]
    """What workers say lately, by namespace; see VerifyCosts."""

    def total(self, name: str) -> int:
        """Of all namespaces that are there or were: no count ever falls."""
        column = self.columns[name]
        return int(self.values[:, column].sum() + self.dropped[column])

    def column(self, name: str) -> NDArray[np.int64]:
        """A number of every namespace."""
        return self.values[:, self.columns[name]]

    def row(self, number: int) -> dict[str, int]:
        """All numbers of one namespace."""
        return dict(zip(self.columns, self.values[number].tolist(), strict=True))


class EngineCollector(Collector):
    """Reads `engine.counters()` at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels: set[str] = set()
        self._lock = Lock()
        self.verify_costs = VerifyCosts()

    def read(self) -> EngineCounters:
        """What the engine says now."""
        namespaces, columns, values, dropped = self._engine.counters()
        there = set(namespaces)
        costs = {name: cost for name, cost in self.verify_costs.lately().items() if name in there}
        return EngineCounters(namespaces, {name: i for i, name in enumerate(columns)}, values, dropped, costs)

    def index_bytes(self) -> int:
        """What the index holds."""
        return self._engine.memory_bytes()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        now = self.read()
        labelled = self._labelled(now)
        families: dict[str, CounterMetricFamily] = {}
        for name, kind, label, value, text in COUNTERS:
            labels = ("namespace", label) if label else ("namespace",)
            family = families.setdefault(kind, CounterMetricFamily(f"histospec_{kind}", text, labels=labels))
            for namespace, counters in labelled.items():
                family.add_metric((namespace, value)[: len(labels)], counters[now.columns[name]])
        yield from families.values()
        for label, kinds, shown in (("source", SOURCES, BY_SOURCE), ("age", AGES, BY_AGE)):
            for name, (text, key) in shown.items():
                family = CounterMetricFamily(name, text, labels=("namespace", label))
                for namespace, counters in labelled.items():
                    for kind in kinds:
                        family.add_metric((namespace, kind), counters[now.columns[f"{kind}.{key}"]])
                yield family
        yield GaugeMetricFamily(
            "histospec_history_tokens", "Tokens of finished responses in the index.", now.total("history_tokens")
        )
        held = GaugeMetricFamily(
            "histospec_namespace_bytes", "Memory that each namespace holds in the index.", labels=("namespace",)
        )
        for namespace, counters in labelled.items():
            held.add_metric((namespace,), counters[now.columns["bytes"]])
        yield held
        yield self._costs(now, labelled)
        yield from self._lock_times()
        yield GaugeMetricFamily("histospec_index_bytes", "Memory that the index holds.", self.index_bytes())
        yield GaugeMetricFamily("histospec_sessions", "Open sessions.", now.total("sessions"))

    def _lock_times(self) -> Iterator[Metric]:
        times = self._engine.lock_times()
        bounds = [*map(str, times["bounds"]), "+Inf"]
        yield HistogramMetricFamily(
            "histospec_engine_lock_seconds",
            "CPU time for which the engine's lock was held at a time; steps of others wait meanwhile.",
            buckets=list(zip(bounds, accumulate(times["counts"]), strict=True)),
            sum_value=times["seconds"],
        )
        yield GaugeMetricFamily(
            "histospec_engine_lock_longest_seconds",
            "The longest of these times since the start.",
            times["longest"],
        )

    def _costs(self, now: EngineCounters, labelled: Mapping[str, object]) -> Metric:
        family = GaugeMetricFamily(
            "histospec_verify_cost",
            "What verifying a drafted token costs, in plain decoding steps: the median of what open streams last said.",
            labels=("namespace",),
        )
        costs: dict[str, list[float]] = {}
        for name, cost in now.verify_costs.items():
            costs.setdefault(name if name in labelled else OTHER_NAMESPACES, []).append(cost)
        for namespace, some in costs.items():
            family.add_metric((namespace,), median(some))
        return family

    def _labelled(self, now: EngineCounters) -> dict[str, list[int]]:
        """Rows by label: namespaces beyond the limit are summed. A namespace keeps its label while it is there."""
        with self._lock:
            names = set(now.namespaces)
            self._labels &= names
            free = MAX_NAMESPACE_LABELS - len(self._labels)
            self._labels.update(heapq.nsmallest(free, names - self._labels))
            with_label = np.fromiter((name in self._labels for name in now.namespaces), bool, len(names))
        numbers = np.flatnonzero(with_label)
        labelled = dict(zip([now.namespaces[i] for i in numbers], now.values[numbers].tolist(), strict=True))
        if len(numbers) < len(names):
            labelled[OTHER_NAMESPACES] = now.values[~with_label].sum(axis=0).tolist()
        return labelled


class HistoryCollector(Collector):
    """Reads what the history has counted at every scrape."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        counts = self._counts
        yield CounterMetricFamily(
            "histospec_ingested_responses", "Responses stored, ingested or committed.", counts.stored_responses
        )
        yield CounterMetricFamily("histospec_ingested_tokens", "Tokens of these responses.", counts.stored_tokens)
        yield GaugeMetricFamily(
            "histospec_loaded_responses", "Responses indexed from the store since the start.", counts.loaded_responses
        )
        yield GaugeMetricFamily(
            "histospec_loading", "Whether the store is being loaded in the background.", counts.loading
        )
        yield CounterMetricFamily(
            "histospec_store_errors", "Requests that the store could not do.", counts.store_errors
        )
        lookups = CounterMetricFamily(
            "histospec_store_lookups",
            "Problems that the index did not hold, by what asking the store gave: hit, miss, failed or skipped.",
            labels=("result",),
        )
        for result in LOOKUPS:
            lookups.add_metric((result,), counts.lookups[result])
        yield lookups


class Metrics:
    """Everything that one server exports, in a registry of its own.

    Args:
        engine: read at every scrape.
        counts: of the history; read at every scrape.

    """

    def __init__(self, engine: Engine, counts: Counts) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.engine = EngineCollector(engine)
        registry.register(self.engine)
        self.counts = counts
        registry.register(HistoryCollector(counts))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self.rpc_seconds = Histogram(
            "histospec_rpc_seconds",
            "Time to answer, by method; for Draft, one message of the stream.",
            ("method",),
            buckets=SECONDS,
            registry=registry,
        )
        self.rpc_errors = Counter(
            "histospec_rpc_errors", "RPCs that failed, by method and code.", ("method", "code"), registry=registry
        )
        self.draft_seconds = Histogram(
            "histospec_draft_seconds", "Time in the engine for one step of a batch.", buckets=SECONDS, registry=registry
        )
        self.refusals = Counter(
            "histospec_refusals",
            "What was refused within a stream that went on: a session to open, one grown too long, a commit.",
            ("what",),
            registry=registry,
        )
        for what in ("open", "step", "commit"):
            self.refusals.labels(what)
        self.late_steps = Counter(
            "histospec_late_steps",
            "Steps whose drafts came after their worker's deadline, as the workers said.",
            registry=registry,
        )
        self.streams = Gauge("histospec_streams", "Open Draft streams.", registry=registry)
        self.http_connections = Gauge(
            "histospec_http_connections", "Open connections of the HTTP port.", registry=registry
        )
        self.http_closed = Counter(
            "histospec_http_closed",
            "Connections of the HTTP port that the server closed: late, larger than a request, or one of too many.",
            ("reason",),
            registry=registry,
        )
        for reason in CLOSED:
            self.http_closed.labels(reason)
