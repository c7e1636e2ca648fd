"""How this server is doing, as one JSON value: what `/status` answers, and the page and `histospec status` show.

The engine is asked every five seconds, and for each answer, in a thread aside: with 4,000 namespaces it takes
milliseconds, in which steps go on.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import Metric

from histospec.native import SOURCES
from histospec.server.logs.recent import RecentLines
from histospec.server.observability.health_hints import Facts, NamespaceFacts, hints
from histospec.server.observability.metrics import EngineCounters, Metrics
from histospec.server.observability.samples import COUNTED, EVERY, RECENT, Sample, Samples
from histospec.server.observability.shard_health import SERVING, UNKNOWN, UNVERIFIED, ShardHealth
from histospec.server.observability.web import Readiness
from histospec.server.security.watched import Watched
from histospec.server.settings.addresses import ShardAddress
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Store

MAX_NAMESPACES = 50  # that are listed: the largest

Counters = Mapping[str, Mapping[str, float]]


class Overview:
    """Samples the metrics of one server, and sums them up; both in `aside`, an executor of one thread."""

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
        self._namespaces: deque[tuple[float, dict[str, dict[str, int]]]] = deque()
        """The largest, as they stood once a minute for the last ten."""
        self._number_of_namespaces = 0
        self._costs: dict[str, float] = {}
        self._started = time.monotonic()  # the time of day may jump
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Takes the first sample, and more from now on."""
        self.sample()
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Takes no more."""
        self._peers.stop()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            await asyncio.get_running_loop().run_in_executor(self._aside, self.sample)

    def sample(self) -> None:
        """Looks once."""
        now = time.monotonic()
        for file in self._watched:  # also where no call comes in
            file.look()
        metrics = self._metrics
        counted = metrics.engine.read()
        values = {name: float(counted.total(name)) for name in COUNTED if name in counted.columns}
        values |= {
            "ingested_responses": metrics.counts.stored_responses,
            "ingested_tokens": metrics.counts.stored_tokens,
            "store_errors": metrics.counts.store_errors,
            "streams": _value(metrics.streams.collect()),
            "sessions": counted.total("sessions"),
            "index_bytes": metrics.engine.index_bytes(),
            "history_tokens": counted.total("history_tokens"),
        }
        buckets = [s.value for m in metrics.draft_seconds.collect() for s in m.samples if s.name.endswith("_bucket")]
        self._samples.add(Sample(now, values, buckets))
        self._keep(now, counted)

    def _keep(self, now: float, counted: EngineCounters) -> None:
        """Of the namespaces: the newest state, and one a minute before it. Of those that are gone, nothing."""
        largest = np.lexsort((counted.column("history_tokens"), counted.column("sessions") > 0))[::-1]
        rows = {counted.namespaces[i]: counted.row(i) for i in largest[:MAX_NAMESPACES].tolist()}
        kept = self._namespaces
        if len(kept) > 1 and kept[-1][0] - kept[-2][0] < RECENT / 10:
            kept.pop()
        there = set(counted.namespaces)
        for _, state in kept:
            for gone in state.keys() - there:
                del state[gone]
        kept.append((now, rows))
        while kept[0][0] < now - RECENT:
            kept.popleft()
        self._number_of_namespaces = len(there)
        self._costs = counted.verify_costs

    async def show(self) -> dict[str, Any]:
        """The value. Counters of `totals` are since the start, those of `recent` of the last ten minutes.

        It holds names, numbers and log lines: no tokens, no texts, no secrets. Times are in seconds since 1970.
        """
        waiting = {part: why for part, why in self._readiness().items() if why}
        summed_up = partial(self._sum_up, waiting, self._shards(waiting), self._recent_lines.newest_first())
        return await asyncio.get_running_loop().run_in_executor(self._aside, summed_up)

    def _sum_up(
        self, waiting: Mapping[str, str], shards: list[dict[str, Any]], lines: list[dict[str, str]]
    ) -> dict[str, Any]:
        self.sample()
        totals, recent = self._samples.totals(), self._samples.recent()
        last = self._namespaces[-1][1]
        costs = self._costs
        now, offset = time.monotonic(), time.time() - time.monotonic()
        return {
            **self._about,
            "now": now + offset,
            "uptime_seconds": now - self._started,
            "cpu_seconds": time.process_time(),
            "ready": not waiting,
            "waiting": waiting,
            "store": self._config.store.partition(":")[0],  # its kind alone: the rest may hold a password
            "memory_bytes": self._config.memory,
            "totals": totals,
            "recent": recent,
            "sources": {
                source: {name: totals[f"{source}.{name}"] for name in ("draft_tokens", "accepted_tokens")}
                for source in SOURCES
            },
            "namespaces": [_row(name, counters, costs.get(name)) for name, counters in last.items()],
            "namespaces_in_all": self._number_of_namespaces,
            "series": self._samples.series(offset=offset),
            "shards": shards,
            "unreadable_files": self._unreadable(),
            "lines": lines,
            "hints": [hint._asdict() for hint in hints(self._facts(waiting, totals, recent, shards, costs))],
        }

    def _unreadable(self) -> dict[str, str]:
        """Why, by name."""
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
        costs: Mapping[str, float],
    ) -> Facts:
        first, last = self._namespaces[0][1], self._namespaces[-1][1]
        well = (SERVING, UNKNOWN, UNVERIFIED)
        return Facts(
            waiting=waiting,
            streams=totals["streams"],
            lookups_ever=totals["lookups_hit"] + totals["lookups_miss"],
            evicted=recent["evicted_responses"] or 0,
            index_bytes=totals["index_bytes"],
            memory=self._config.memory,
            store_errors=recent["store_errors"] or 0,
            unreadable=self._unreadable(),
            store_trouble=self._store.trouble,
            damaged=self._store.damaged_responses,
            retention_paused=self._store.retention_paused,
            draft_p99=recent["draft_p99"],
            away=[shard["name"] for shard in shards if not shard["me"] and shard["state"] not in well],
            namespaces=[_lately(name, first.get(name, {}), last[name], costs.get(name)) for name in last],
        )


_HELD = ("sessions", "problems", "history_responses", "history_tokens", "newest_epoch", "bytes")


def _lately(
    name: str, before: Mapping[str, float], now: Mapping[str, float], verify_cost: float | None
) -> NamespaceFacts:
    def counted(counter: str) -> float:
        grown = now.get(counter, 0) - before.get(counter, 0)
        return grown if grown >= 0 else now.get(counter, 0)  # dropped meanwhile, and there again

    return NamespaceFacts(
        name=name,
        hits=counted("lookups_hit"),
        misses=counted("lookups_miss"),
        history_responses=now["history_responses"],
        hits_ever=now["lookups_hit"],
        lookups_ever=now["lookups_hit"] + now["lookups_miss"],
        drafted=counted("history.draft_tokens"),
        accepted=counted("history.accepted_tokens"),
        verify_cost=verify_cost,
    )


def _row(name: str, counters: Mapping[str, float], verify_cost: float | None) -> dict[str, Any]:
    """A line of the table of namespaces; `bytes` is 0 where the engine does not tell."""
    counted = ("lookups_hit", "lookups_miss", "draft_tokens", "accepted_tokens", "generated_tokens")
    return {"name": name, "verify_cost": verify_cost} | {key: counters.get(key, 0) for key in (*_HELD, *counted)}


def _value(metrics: Iterable[Metric]) -> float:
    """Of a counter or gauge without labels."""
    return next(s.value for m in metrics for s in m.samples if not s.name.endswith("_created"))
