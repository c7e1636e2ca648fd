"""How close a server is to its limits: what it was given, and how much of that is in use. Read at every scrape."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from histospec.server.errors import StoreError
from histospec.server.logs.output import dropped
from histospec.server.machine import memory_limit
from histospec.server.security.tls import Certificates
from histospec.server.security.watched import Watched
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Store


class Vitals(Collector):
    """To be made in the thread of the event loop.

    Args:
        config: what the server was given.
        store: what waits for it, and what is wrong with it, is shown.
        certificates: None without TLS.
        watched: files that may change while the server runs.
        ready: whether the server is.

    """

    def __init__(
        self,
        config: Config,
        store: Store,
        certificates: Certificates | None,
        watched: Sequence[Watched[Any]],
        ready: Callable[[], bool],
    ) -> None:
        self._config = config
        self._store = store
        self._certificates = certificates
        self._watched = watched
        self._ready = ready
        self._memory_limit = memory_limit()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield GaugeMetricFamily("histospec_ready", "Whether the store is loaded and no drain has begun.", self._ready())
        yield GaugeMetricFamily(
            "histospec_memory_budget_bytes", "What the index may hold (--memory).", self._config.memory
        )
        yield GaugeMetricFamily(
            "histospec_memory_limit_bytes",
            "What the process may hold: the limit of its control group, or the memory of the machine.",
            self._memory_limit,
        )
        with suppress(StoreError):  # one that is not open yet has no numbers
            yield from list(self._of_store())
        yield CounterMetricFamily(
            "histospec_event_loop_cpu_seconds",
            "CPU time of the thread that answers and drafts: one second a second is all there is.",
            time.clock_gettime(self._clock),
        )
        if self._certificates is not None:
            yield GaugeMetricFamily(
                "histospec_certificate_expiry_timestamp_seconds",
                "When the first certificate of the server's chain expires, in seconds since 1970.",
                self._certificates.expiry(),
            )
        unreadable = GaugeMetricFamily(
            "histospec_watched_file_unreadable",
            "1 while files of tokens or certificates cannot be used as they are; what they held before is in force.",
            labels=("file",),
        )
        for file in self._watched:
            file.look()
            unreadable.add_metric((file.name,), bool(file.failure))
        yield unreadable
        yield CounterMetricFamily(
            "histospec_log_lines_dropped", "Lines of the log that could not be written.", dropped()
        )

    def _of_store(self) -> Iterator[Metric]:
        store = self._store
        yield GaugeMetricFamily("histospec_store_waiting_bytes", "Bytes that wait to be stored.", store.waiting_bytes)
        yield GaugeMetricFamily(
            "histospec_store_waiting_limit_bytes",
            "How many may wait before ingests and commits are refused (--max-backlog).",
            self._config.max_backlog,
        )
        yield GaugeMetricFamily(
            "histospec_store_usable",
            "Whether the store takes responses: 0 where its files are gone or are no longer those that it opened.",
            not store.trouble,
        )
        yield CounterMetricFamily(
            "histospec_store_damaged_responses",
            "Stored responses that were found damaged, or could not be read, and are left out.",
            store.damaged_responses,
        )
        yield GaugeMetricFamily(
            "histospec_retention_paused",
            "Whether --retention waits for a person because the clock may have jumped.",
            bool(store.retention_paused),
        )
        size = store.size
        for name, text, value in (
            (
                "histospec_store_bytes",
                "What the store holds: its file less free pages, or Redis' memory.",
                size.held,
            ),
            ("histospec_store_limit_bytes", "What the store may hold: --disk, or Redis' maxmemory.", size.limit),
            ("histospec_disk_free_bytes", "Room that is left on the volume of --data-dir.", size.disk_free),
            ("histospec_disk_size_bytes", "Size of the volume of --data-dir.", size.disk_size),
        ):
            if value is not None:  # no number is better than a wrong one
                yield GaugeMetricFamily(name, text, value)
