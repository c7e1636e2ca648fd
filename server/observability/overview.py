"""The state of this server as one JSON value: the answer of `/status`, shown by the page and by `histospec status`.

A separate thread reads the engine every five seconds and for each answer. With 4,000 namespaces, a reading takes
milliseconds, and steps go on meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import Metric

from histospec.native import SOURCES
from histospec.protocol.gains import gain
from histospec.server.errors import StoreError
from histospec.server.history.namespaces import Progress
from histospec.server.history.tenants import Tenants
from histospec.server.logs.lines import RecentLines
from histospec.server.observability.health_hints import Facts, hints
from histospec.server.observability.metrics import Metrics
from histospec.server.observability.runs import Runs
from histospec.server.observability.samples import COUNTED, EVERY, Sample, Samples
from histospec.server.observability.shard_health import SERVING, UNKNOWN, UNVERIFIED, ShardHealth
from histospec.server.observability.web import Readiness
from histospec.server.security.rejections import Rejected, Rejections
from histospec.server.security.watched_files import Watched
from histospec.server.settings.addresses import ShardAddress
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Store, StoreSize

MAX_TENANTS = 50  # listed, as many as namespaces


class Overview:
    """Samples the metrics of one server and sums them up. Both run in `aside`, an executor with one thread."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        readiness: Readiness,
        me: ShardAddress,
        about: Mapping[str, str],
        recent_lines: RecentLines,
        watched: Sequence[Watched[Any]],
        store: Store,
        progress: Callable[[str], Progress],
        tenants: Tenants,
        rejections: Rejections,
        aside: Executor,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._readiness = readiness
        self._me = me
        self._about = about
        self._recent_lines = recent_lines
        self._watched = watched
        self._aside = aside
        self._store = store
        self._peers = ShardHealth([peer for peer in config.peers if peer.name != me.name], config)
        self._samples = Samples()
        self._runs = Runs(progress)
        self._tenants = tenants
        self._rejections = rejections
        self._size = StoreSize()
        self._started = time.monotonic()  # the wall clock may jump
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Takes the first sample, and starts to sample regularly."""
        self.sample()
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Stops sampling."""
        self._peers.stop()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            await asyncio.get_running_loop().run_in_executor(self._aside, self.sample)

    def sample(self) -> None:
        """Takes one sample."""
        now = time.monotonic()
        for file in self._watched:  # also check files while no calls arrive
            file.look()
        metrics = self._metrics
        counted = metrics.engine.read()
        totals = counted.totals()
        buckets = [s.value for m in metrics.draft_seconds.collect() for s in m.samples if s.name.endswith("_bucket")]
        values = {name: float(totals[name]) for name in COUNTED if name in totals}
        values |= {
            "ingested_responses": metrics.counts.stored_responses,
            "ingested_tokens": metrics.counts.stored_tokens,
            "too_old_responses": metrics.counts.too_old,
            "store_errors": metrics.counts.store_errors,
            "late_steps": _value(metrics.late_steps.collect()),
            "batch_steps": buckets[-1],
            "streams": _value(metrics.streams.collect()),
            "sessions": totals["sessions"],
            "index_bytes": metrics.engine.index_bytes(),
            "history_tokens": totals["history_tokens"],
        }
        self._samples.add(Sample(now, values, buckets))
        self._runs.add(now, counted)
        with suppress(StoreError):  # the store is not open yet
            self._size = self._store.size

    async def show(self) -> dict[str, Any]:
        """Returns the value. Counters in `totals` are since the start, those in `recent` of the last ten minutes.

        It holds names, numbers and log lines, but no tokens, texts or secrets. Times are in seconds since 1970.
        """
        waiting = {part: why for part, why in self._readiness().items() if why}
        rejected = [replace(kind) for kind in self._rejections.lately()]
        summed_up = partial(self._sum_up, waiting, self._shards(waiting), self._recent_lines.newest_first(), rejected)
        return await asyncio.get_running_loop().run_in_executor(self._aside, summed_up)

    def _sum_up(
        self,
        waiting: Mapping[str, str],
        shards: list[dict[str, Any]],
        lines: list[dict[str, str]],
        rejected: Sequence[Rejected],
    ) -> dict[str, Any]:
        self.sample()
        totals, recent = self._samples.totals(), self._samples.recent()
        lately = {name: recent[name] or 0.0 for name in COUNTED}
        now, offset = time.monotonic(), time.time() - time.monotonic()
        return {
            **self._about,
            "now": now + offset,
            "uptime_seconds": now - self._started,
            "cpu_seconds": time.process_time(),
            "ready": not waiting,
            "waiting": waiting,
            "store": self._config.kind,  # only the kind: the URL may hold a password
            "memory_bytes": self._config.memory,
            "store_bytes": self._size.held,
            "store_limit_bytes": self._size.limit,
            "disk_free_bytes": self._size.disk_free,
            "disk_size_bytes": self._size.disk_size,
            "totals": totals,
            "recent": recent,
            "gains": {"recent": gain(lately)._asdict(), "totals": gain(totals)._asdict()},
            "sources": {
                source: {name: totals[f"{source}.{name}"] for name in ("draft_tokens", "accepted_tokens")}
                for source in SOURCES
            },
            "tenants": self._tenants_in_use(),
            "namespaces": self._runs.rows(_late(recent), _late(totals)),
            "namespaces_in_all": self._runs.in_all,
            "series": self._samples.series(offset=offset),
            "shards": shards,
            "unreadable_files": self._unreadable(),
            "lines": lines,
            "hints": [hint._asdict() for hint in hints(self._facts(waiting, totals, recent, shards, rejected))],
        }

    def _tenants_in_use(self) -> list[dict[str, Any]]:
        """Returns the tenants that use most of the index; none without a token file."""
        found: dict[str, dict[str, Any]] = {}
        for use in self._tenants.uses():
            row = found.setdefault(use.tenant, {"name": use.tenant or "(no tenant)", "refusals": 0})
            row[use.resource], row[f"{use.resource}_share"] = use.used, use.share
            row["refusals"] += use.refusals
        rows = sorted(found.values(), key=lambda row: -row["index"])
        return rows[:MAX_TENANTS] if self._tenants.known else []

    def _unreadable(self) -> dict[str, str]:
        """Returns why files cannot be read, by name."""
        return {file.name: file.failure for file in self._watched if file.failure}

    def _shards(self, waiting: Mapping[str, str]) -> list[dict[str, Any]]:
        states = {self._me.name: "NOT_SERVING" if waiting else SERVING, **self._peers.states()}
        addresses = {peer.name: peer.address for peer in (self._me, *self._config.peers)}
        return [
            {"name": name, "address": str(addresses[name]), "me": name == self._me.name, "state": state}
            for name, state in states.items()
        ]

    def _facts(
        self,
        waiting: Mapping[str, str],
        totals: Mapping[str, float],
        recent: Mapping[str, float | None],
        shards: Iterable[Mapping[str, Any]],
        rejected: Sequence[Rejected],
    ) -> Facts:
        well = (SERVING, UNKNOWN, UNVERIFIED)
        return Facts(
            waiting=waiting,
            streams=totals["streams"],
            lookups_ever=totals["lookups_hit"] + totals["lookups_miss"],
            evicted=recent["evicted_by_memory"] or 0,
            index_bytes=totals["index_bytes"],
            memory=self._config.memory,
            store_errors=recent["store_errors"] or 0,
            too_old=recent["too_old_responses"] or 0,
            latest_too_old=self._metrics.counts.latest_too_old,
            unreadable=self._unreadable(),
            rejected=rejected,
            store_trouble=self._store.trouble,
            store_hazard=self._store.hazard,
            store_outage=self._store.outage,
            damaged=self._store.damaged_responses,
            retention_paused=self._store.retention_paused,
            store_size=self._size,
            draft_p99=recent["draft_p99"],
            away=[shard["name"] for shard in shards if not shard["me"] and shard["state"] not in well],
            namespaces=self._runs.facts(),
        )


def _late(counted: Mapping[str, float | None]) -> float:
    """Returns the share of the steps of this server whose drafts were late."""
    return (counted["late_steps"] or 0.0) / (counted["batch_steps"] or 1.0)


def _value(metrics: Iterable[Metric]) -> float:
    """Returns the value of a counter or gauge without labels."""
    return next(s.value for m in metrics for s in m.samples if not s.name.endswith("_created"))
