"""The limits of a server and how much of them is in use, read at every scrape."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from histospec.server.errors import StoreError
from histospec.server.history.tenants import Tenants
from histospec.server.logs.output import dropped
from histospec.server.machine import memory_limit
from histospec.server.observability.run_series import MAX_LABELS, OTHER
from histospec.server.security.tls import Certificates
from histospec.server.security.watched_files import Watched
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Store

NOBODY_LABEL = "_nobody"
"""The label of what belongs to no tenant."""


class Vitals(Collector):
    """Create it in the thread of the event loop.

    Args:
        config: holds the limits.
        store: its queue and faults are shown.
        certificates: None without TLS.
        watched: files that may change while the server runs.
        tenants: what they use is shown.
        ready: returns whether the server is ready.

    """

    def __init__(
        self,
        config: Config,
        store: Store,
        certificates: Certificates | None,
        watched: Sequence[Watched[Any]],
        tenants: Tenants,
        ready: Callable[[], bool],
    ) -> None:
        self._config = config
        self._store = store
        self._certificates = certificates
        self._watched = watched
        self._tenants = tenants
        self._labels: dict[str, str] = {}  # of the tenants that came first
        self._ready = ready
        self._memory_limit = memory_limit()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield GaugeMetricFamily("histospec_ready", "1 if the store is ready and no drain has begun.", self._ready())
        yield GaugeMetricFamily(
            "histospec_memory_budget_bytes", "Memory budget of the index (--memory).", self._config.memory
        )
        yield GaugeMetricFamily(
            "histospec_memory_limit_bytes",
            "Memory limit of the process: that of its control group, or the memory of the machine.",
            self._memory_limit,
        )
        with suppress(StoreError):  # a store that is not open yet has no numbers
            yield from list(self._of_store())
        yield CounterMetricFamily(
            "histospec_event_loop_cpu_seconds",
            "CPU time of the thread that answers and drafts; at one second per second it is saturated.",
            time.clock_gettime(self._clock),
        )
        if self._certificates is not None:
            yield GaugeMetricFamily(
                "histospec_certificate_expiry_timestamp_seconds",
                "Expiry of the first certificate of the server's chain to expire, in seconds since 1970.",
                self._certificates.expiry(),
            )
        unreadable = GaugeMetricFamily(
            "histospec_watched_file_unreadable",
            "1 while files of tokens or certificates cannot be read; their previous contents stay in force.",
            labels=("file",),
        )
        for file in self._watched:
            file.look()
            unreadable.add_metric((file.name,), bool(file.failure))
        yield unreadable
        yield from self._of_tenants()
        yield CounterMetricFamily("histospec_log_lines_dropped", "Log lines that could not be written.", dropped())

    def _of_tenants(self) -> Iterator[Metric]:
        labels = ("tenant", "resource")
        used = GaugeMetricFamily(
            "histospec_tenant_used",
            "What a tenant uses: bytes of the index and the store, namespaces, open sessions.",
            labels=labels,
        )
        share = GaugeMetricFamily(
            "histospec_tenant_share", "The most that a tenant may use, as --tokens gives it.", labels=labels
        )
        refusals = CounterMetricFamily(
            "histospec_tenant_refusals", "Requests refused because a tenant used its share.", labels=labels
        )
        sums: dict[tuple[str, str], list[int]] = {}
        for use in self._tenants.uses():
            if use.tenant not in self._labels and len(self._labels) < MAX_LABELS:
                self._labels[use.tenant] = use.tenant or NOBODY_LABEL
            label = self._labels.get(use.tenant, OTHER)
            numbers = sums.setdefault((label, use.resource), [0, 0])
            numbers[0] += use.used
            numbers[1] += use.refusals
            if use.share is not None and label != OTHER:
                share.add_metric((label, use.resource), use.share)
        for key, (in_use, refused) in sums.items():
            used.add_metric(key, in_use)
            refusals.add_metric(key, refused)
        yield from (used, share, refusals)

    def _of_store(self) -> Iterator[Metric]:
        store = self._store
        yield GaugeMetricFamily("histospec_store_waiting_bytes", "Bytes that wait for the store.", store.waiting_bytes)
        yield GaugeMetricFamily(
            "histospec_store_waiting_limit_bytes",
            "Bytes that may wait before ingests wait and the server refuses commits (--max-backlog).",
            self._config.max_backlog,
        )
        yield GaugeMetricFamily(
            "histospec_store_usable",
            "1 if the store accepts responses; 0 if its files are missing or are not those that it opened.",
            not store.trouble,
        )
        yield CounterMetricFamily(
            "histospec_store_damaged_responses",
            "Stored responses left out because they are damaged or unreadable.",
            store.damaged_responses,
        )
        yield GaugeMetricFamily(
            "histospec_retention_paused",
            "1 if --retention waits for a person because the clock may have jumped.",
            bool(store.retention_paused),
        )
        size = store.size
        for name, text, value in (
            (
                "histospec_store_bytes",
                "Size of the store: its file without free pages, or Redis' memory.",
                size.held,
            ),
            ("histospec_store_limit_bytes", "Maximum size of the store: --disk, or Redis' maxmemory.", size.limit),
            ("histospec_disk_free_bytes", "Free space on the volume of --data-dir.", size.disk_free),
            ("histospec_disk_size_bytes", "Size of the volume of --data-dir.", size.disk_size),
        ):
            if value is not None:  # omit unknown values
                yield GaugeMetricFamily(name, text, value)
