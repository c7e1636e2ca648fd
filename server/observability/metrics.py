"""The metrics for Prometheus: the engine's counters at the moment of a scrape, and the counters of RPCs."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from threading import Lock

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

from histospec.native import Engine
from histospec.server.history.counts import LOOKUPS, Counts
from histospec.server.observability.connections import CLOSED
from histospec.server.observability.engine_counters import EngineCounters, EngineReader
from histospec.server.observability.run_series import RunSeries

# 20 ms, the default deadline of a step, is a bucket bound: alerts count the steps that took longer.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

CALLER_LIMITS = ("arriving", "late", "calls", "answers", "unread")
"""Limits on callers that end calls: memory and time of messages that arrive, calls and watches at a time, memory of
answers; and unread answers, which end a connection."""


class _Scrape(Collector):
    """The metrics of one scrape: one reading of the engine and of the history's counters, and a registry."""

    def __init__(self, engine: Engine, now: EngineCounters, counts: Counts, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._now = now
        self._counts = counts
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield from self._of_engine()
        yield from self._of_history()
        yield from self._registry.collect()

    def _of_engine(self) -> Iterator[Metric]:
        totals, times = self._now.totals(), self._engine.lock_times()
        yield GaugeMetricFamily(
            "histospec_history_tokens", "Tokens of finished responses in the index.", totals["history_tokens"]
        )
        yield GaugeMetricFamily("histospec_sessions", "Open sessions.", totals["sessions"])
        bounds = [*map(str, times["bounds"]), "+Inf"]
        yield HistogramMetricFamily(
            "histospec_engine_lock_seconds",
            "CPU time per hold of the engine's lock; other steps wait meanwhile.",
            buckets=list(zip(bounds, accumulate(times["counts"]), strict=True)),
            sum_value=times["seconds"],
        )
        yield GaugeMetricFamily(
            "histospec_engine_lock_longest_seconds",
            "Longest CPU time per hold of the engine's lock since the start.",
            times["longest"],
        )
        yield GaugeMetricFamily("histospec_index_bytes", "Memory of the index.", self._engine.memory_bytes())

    def _of_history(self) -> Iterator[Metric]:
        counts = self._counts
        yield CounterMetricFamily(
            "histospec_ingested_responses", "Stored responses, ingested or committed.", counts.stored_responses
        )
        yield CounterMetricFamily(
            "histospec_too_old_responses",
            "Responses that the store did not keep, because they were older than what it keeps of their problem.",
            counts.too_old,
        )
        yield CounterMetricFamily("histospec_ingested_tokens", "Tokens of stored responses.", counts.stored_tokens)
        yield GaugeMetricFamily(
            "histospec_loaded_responses", "Responses indexed from the store since the start.", counts.loaded_responses
        )
        yield GaugeMetricFamily(
            "histospec_loading", "1 while the store is being loaded in the background.", counts.loading
        )
        yield CounterMetricFamily("histospec_store_errors", "Requests that failed in the store.", counts.store_errors)
        lookups = CounterMetricFamily(
            "histospec_store_lookups",
            "Lookups in the store for problems missing in the index, by result: hit, miss, failed or skipped.",
            labels=("result",),
        )
        for result in LOOKUPS:
            lookups.add_metric((result,), counts.lookups[result])
        yield lookups


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        engine: read at every scrape.
        counts: counters of the history; read at every scrape.

    """

    def __init__(self, engine: Engine, counts: Counts) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        """All metrics except those that each scrape reads from the engine and the history."""
        self.engine = EngineReader(engine)
        self.counts = counts
        self._engine = engine
        self._runs = RunSeries()
        self._scraping = Lock()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self.rpc_seconds = Histogram(
            "histospec_rpc_seconds",
            "Time to answer, by method; for Draft, per message of the stream.",
            ("method",),
            buckets=SECONDS,
            registry=registry,
        )
        self.rpc_errors = Counter(
            "histospec_rpc_errors", "Failed RPCs, by method and code.", ("method", "code"), registry=registry
        )
        self.caller_limits = self._counter(
            "histospec_caller_limits",
            "Calls that the server refused and connections that it ended because of a limit on callers, by limit: "
            "arriving, late, calls, answers or unread.",
            limit=CALLER_LIMITS,
        )
        self.draft_seconds = Histogram(
            "histospec_draft_seconds", "Engine time per batch step.", buckets=SECONDS, registry=registry
        )
        self.refusals = self._counter(
            "histospec_refusals",
            "Parts of a message refused while the stream continued: an open, a session that grew too long, a commit.",
            what=("open", "step", "commit"),
        )
        self.late_steps = Counter(
            "histospec_late_steps",
            "Steps whose drafts missed the worker's deadline, as workers report them.",
            registry=registry,
        )
        self.aborted = self._counter(
            "histospec_aborted_responses",
            "Responses that workers aborted and may continue, and sessions that continued one.",
            event=("aborted", "continued"),
        )
        self.streams = Gauge("histospec_streams", "Open Draft streams.", registry=registry)
        self.http_connections = Gauge(
            "histospec_http_connections", "Open connections of the HTTP port.", registry=registry
        )
        self.http_closed = self._counter(
            "histospec_http_closed",
            "Connections of the HTTP port that the server closed, by reason: too late, too large or too many.",
            reason=CLOSED,
        )

    def _counter(self, name: str, text: str, **values: Sequence[str]) -> Counter:
        """Returns a counter with a label, which starts at 0 for each of these values of the label."""
        [(label, known)] = values.items()
        counter = Counter(name, text, (label,), registry=self.registry)
        for value in known:
            counter.labels(value)
        return counter

    def exposition(self, encode: Callable[[Collector], bytes], open_metrics: bool) -> bytes:
        """Returns all metrics in the format of a scraper.

        Args:
            encode: prometheus_client's encoder of the format.
            open_metrics: whether the format is OpenMetrics.

        """
        with self._scraping:
            now = self.engine.read()
            pieces = [piece.encode() for piece in self._runs.text(now, open_metrics)]
        return b"".join((*pieces, encode(_Scrape(self._engine, now, self.counts, self.registry))))
