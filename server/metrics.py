"""What Prometheus reads: the engine's own counters at the moment of a scrape, and what the RPCs count."""

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from histospec.native import Engine

# A label value costs memory in every scraper for as long as it is kept, and clients choose namespaces: the first so
# many have a label of their own, the others share one.
MAX_NAMESPACE_LABELS = 256
OTHER_NAMESPACES = "_other"

# 20 ms, the deadline of a step unless told otherwise, is a limit of its own: alerts ask how many came later.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

BY_RESULT = {
    "histospec_problem_lookups": (
        "Sessions opened, by whether their problem had history.",
        {"hit": "lookups_hit", "miss": "lookups_miss"},
    ),
    "histospec_twin_lookups": (
        "Sessions opened with a seed, by whether the latest response drawn with it was there.",
        {"hit": "twins_hit", "miss": "twins_miss"},
    ),
    "histospec_drafts": (
        "Drafts asked for, by whether there was anything to draft.",
        {"hit": "drafts_hit", "empty": "drafts_empty"},
    ),
}
BY_SOURCE = {
    "histospec_source_draft_tokens": (
        "Tokens drafted, by the source that knew the longest context: history, own, siblings or namespace; or twin.",
        "draft_tokens",
    ),
    "histospec_source_accepted_tokens": (
        "Drafted tokens that the sessions then generated, by that source.",
        "accepted_tokens",
    ),
}
SOURCES = ("history", "own", "siblings", "namespace", "twin")
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
AGES = ("0", "1", "2", "3", "4+")
TOTALS = {
    "histospec_tail_drafts": (
        "Drafts for sessions expected to go on the longest, where a worker gives these more.",
        "drafts_tail",
    ),
    "histospec_draft_tokens": ("Tokens drafted.", "draft_tokens"),
    "histospec_accepted_tokens": ("Drafted tokens that the sessions then generated.", "accepted_tokens"),
    "histospec_generated_tokens": ("Tokens that the sessions generated.", "generated_tokens"),
    "histospec_evicted_responses": (
        "Responses gone from the index: for memory, or by age.",
        "evicted_responses",
    ),
}


class EngineCollector(Collector):
    """Reads `engine.stats()` at every scrape. Counters of a dropped namespace stay, so that no total ever falls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._retired: dict[str, dict[str, int]] = {}
        self._labels: set[str] = set()
        self._lock = Lock()

    def retire(self, namespace: str) -> None:
        """Drops a namespace from the engine and keeps what it had counted."""
        with self._lock:
            before = self._counted().get(namespace, {})
            self._engine.drop_namespace(namespace)
            after = self._counted().get(namespace, {})
            kept = self._retired.setdefault(namespace, {})
            for name, value in before.items():
                kept[name] = kept.get(name, 0) + value - after.get(name, 0)

    def label(self, namespace: str) -> str:
        """The label of a namespace: its name, or the one that all beyond the limit share."""
        if namespace not in self._labels and len(self._labels) < MAX_NAMESPACE_LABELS:
            self._labels.add(namespace)
        return namespace if namespace in self._labels else OTHER_NAMESPACES

    def read(self) -> tuple[Mapping[str, Any], dict[str, dict[str, int]]]:
        """`engine.stats()`, and what was counted by namespace, dropped ones included; by source as `source.counter`."""
        with self._lock:
            stats = self._engine.stats()
            return stats, self._total(_flat(stats["namespaces"]))

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        stats, namespaces = self.read()
        for name, (text, results) in BY_RESULT.items():
            family = CounterMetricFamily(name, text, labels=("namespace", "result"))
            for namespace, counters in self._labelled(namespaces).items():
                for result, key in results.items():
                    family.add_metric((namespace, result), counters.get(key, 0))
            yield family
        for label, kinds, families in (("source", SOURCES, BY_SOURCE), ("age", AGES, BY_AGE)):
            for name, (text, key) in families.items():
                family = CounterMetricFamily(name, text, labels=("namespace", label))
                for namespace, counters in self._labelled(namespaces).items():
                    for kind in kinds:
                        family.add_metric((namespace, kind), counters.get(f"{kind}.{key}", 0))
                yield family
        for name, (text, key) in TOTALS.items():
            yield CounterMetricFamily(name, text, sum(counters.get(key, 0) for counters in namespaces.values()))
        tokens = sum(counters.get("history_tokens", 0) for counters in stats["namespaces"].values())
        yield GaugeMetricFamily("histospec_history_tokens", "Tokens of finished responses in the index.", tokens)
        held = GaugeMetricFamily(
            "histospec_namespace_bytes", "Memory that each namespace holds in the index.", labels=("namespace",)
        )
        for namespace, counters in self._labelled(_flat(stats["namespaces"])).items():
            held.add_metric((namespace,), counters["bytes"])
        yield held
        yield GaugeMetricFamily("histospec_index_bytes", "Memory that the index holds.", stats["index_bytes"])
        yield GaugeMetricFamily("histospec_sessions", "Open sessions.", stats["sessions"])

    def _counted(self) -> dict[str, dict[str, int]]:
        return _flat(self._engine.stats()["namespaces"])

    def _total(self, live: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Counters of all namespaces, dropped ones included."""
        total = dict(live)
        for name, counters in self._retired.items():
            mine = total[name] = dict(live.get(name, {}))
            for key, value in counters.items():
                mine[key] = mine.get(key, 0) + value
        return total

    def _labelled(self, namespaces: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        """The same by label: the namespaces beyond the limit are summed."""
        labelled: dict[str, dict[str, int]] = {}
        for name, counters in namespaces.items():
            mine = labelled.setdefault(self.label(name), {})
            for key, value in counters.items():
                mine[key] = mine.get(key, 0) + value
        return labelled


def _flat(namespaces: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """What the engine counted by namespace, with what it counted by source or age as `source.counter`."""
    flat = {}
    for namespace, counters in namespaces.items():
        mine = flat[namespace] = dict(counters)
        for kind, counted in (*mine.pop("sources").items(), *mine.pop("ages").items()):
            for name, value in counted.items():
                mine[f"{kind}.{name}"] = value
    return flat


class Metrics:
    """Everything that one server exports, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.engine = EngineCollector(engine)
        registry.register(self.engine)
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
        self.verify_cost = Gauge(
            "histospec_verify_cost",
            "What a worker last said that verifying one drafted token costs, in units of a plain decoding step.",
            ("namespace",),
            registry=registry,
        )
        self.ingested_responses = Counter(
            "histospec_ingested_responses", "Responses stored, ingested or committed.", registry=registry
        )
        self.ingested_tokens = Counter("histospec_ingested_tokens", "Tokens of these responses.", registry=registry)
        self.loaded_responses = Gauge(
            "histospec_loaded_responses", "Responses indexed from the store since the start.", registry=registry
        )
        self.store_errors = Counter(
            "histospec_store_errors", "Requests that the store could not do.", registry=registry
        )
        self.store_lookups = Counter(
            "histospec_store_lookups",
            "Problems that the index did not hold, by what asking the store gave: hit, miss, failed or skipped.",
            ("result",),
            registry=registry,
        )
        for result in ("hit", "miss", "failed", "skipped"):
            self.store_lookups.labels(result)
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

    def saw_verify_cost(self, namespace: str, verify_cost: float) -> None:
        """Notes what a step said."""
        self.verify_cost.labels(self.engine.label(namespace)).set(verify_cost)
