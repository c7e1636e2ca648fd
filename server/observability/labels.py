"""Decides which namespaces have their own series at /metrics, and counts all others together."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.server.observability.engine_counters import COUNTED, EngineCounters

MAX_NAMESPACE_LABELS = 256
"""Clients choose namespaces, and each label value costs a scraper memory for as long as it keeps the series."""
OTHER_NAMESPACES = "_other"
"""The label that all namespaces without their own label share."""
IDLE = 3600.0
"""Seconds without a session, a step or an ingest after which a namespace may lose its label. A run pauses for minutes
between rollouts to train, evaluate or write a checkpoint, and alerts look back an hour."""

STEPPED = ("lookups_hit", "lookups_miss", "drafts_hit", "drafts_empty", "generated_tokens")
"""Only sessions change these."""
CHANGED = (*STEPPED, "history_responses", "evicted_by_memory", "evicted_by_epochs", "evicted_by_responses")
"""Sessions, steps, ingests and rewinds change the sum of these; evictions do not."""

# Why a namespace keeps or loses its label, weakest claim first. A namespace takes labels with weaker claims.
GONE = 0
"""The namespace was dropped. Every namespace may take the label."""
RESTING = 1
"""The namespace is idle. Every active namespace may take the label."""
STORED = 2
"""The namespace was loaded or ingested but had no session since the start. An active one with sessions may take it."""

Rows = NDArray[np.int64]


class Labelled(NamedTuple):
    """The rows for /metrics."""

    names: list[str]
    """The namespaces with a label, then OTHER_NAMESPACES if a namespace has no label or something was counted there."""
    values: Rows
    """One row per name, in the columns of EngineCounters."""


class Labels:
    """Assigns labels to namespaces. Not thread-safe; `show` receives the readings of one engine in order.

    A namespace keeps its label until it is dropped; or until it is idle while an active namespace has no label; or,
    if it had no session since the start, until a namespace with sessions has no label. The label goes to the most
    active namespace without one. A label changes hands at most twice an hour, so a scraper meets at most 2 * `most`
    new names an hour.

    Each count goes to one label: to the namespace's own if it had the label at the previous reading or did not exist
    then, otherwise to OTHER_NAMESPACES, whose counters therefore never fall. A namespace that gets a label again
    continues from its own counters.

    Args:
        most: number of labels.
        clock: monotonic clock in seconds.

    """

    def __init__(self, most: int = MAX_NAMESPACE_LABELS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._given: dict[str, float] = {}
        """When each label was given. The label of a dropped namespace keeps its name until another one takes it."""
        # The previous reading. Its last row stands for a namespace that did not exist.
        self._places: dict[str, int] = {}
        self._changes: Rows = np.zeros(1, np.int64)
        self._active = np.full(1, -np.inf)
        self._shown: dict[str, Rows] = {}
        self._total: Rows = np.zeros(len(COUNTED), np.int64)
        self._other: Rows = np.zeros(len(COUNTED), np.int64)

    def show(self, now: EngineCounters) -> Labelled:
        """Returns the rows to show for a reading."""
        places = {name: place for place, name in enumerate(now.namespaces)}
        before = np.fromiter(map(self._places.get, now.namespaces, repeat(-1)), np.int64, len(places))
        changes = now.values[:, now.numbers(CHANGED)].sum(axis=1)
        did = np.abs(changes - self._changes[before])
        seconds = self._clock()
        active = np.where((did > 0) | (now.column("sessions") > 0), seconds, self._active[before])
        taken = self._given.keys() | {OTHER_NAMESPACES}  # two series with the same name would break the scrape
        if waiting := [place for name, place in places.items() if name not in taken]:
            self._give(now, places, waiting, did, active, seconds)

        names = [name for name in self._given if name in places]
        rows = now.values[[places[name] for name in names]]
        self._count(now, names, rows)
        self._places, self._changes, self._active = places, np.append(changes, 0), np.append(active, -np.inf)
        if len(names) == len(places) and not self._other.any():
            return Labelled(names, rows)
        other = now.values.sum(axis=0) - rows.sum(axis=0)
        other[now.numbers(COUNTED)] = self._other
        return Labelled([*names, OTHER_NAMESPACES], np.vstack((rows, other)))

    def _give(
        self,
        now: EngineCounters,
        places: Mapping[str, int],
        waiting: Sequence[int],
        did: Rows,
        active: NDArray[np.float64],
        seconds: float,
    ) -> None:
        """Gives labels to waiting namespaces, the most active first."""
        stepped: NDArray[np.bool_] = np.asarray(now.values[:, now.numbers(STEPPED)].any(axis=1), bool)
        idle: NDArray[np.bool_] = np.asarray(active <= seconds - IDLE, bool)
        right = np.where(idle, GONE, np.where(stepped, STORED, RESTING))
        order = np.lexsort([key[waiting] for key in (now.column("history_tokens"), did, active, right)])[::-1]

        free: list[tuple[int, float, str]] = []
        for name, given in self._given.items():
            place = places.get(name)
            if given <= seconds - IDLE and (place is None or idle[place]):
                free.append((GONE, -np.inf, name) if place is None else (RESTING, active[place], name))
            elif place is not None and not stepped[place]:
                free.append((STORED, active[place], name))
        free.sort(reverse=True)  # pop() takes the weakest claim first

        for place in np.array(waiting)[order].tolist():
            if len(self._given) >= self._most:
                if not free or free[-1][0] > right[place]:
                    break
                del self._given[free.pop()[2]]
            self._given[now.namespaces[place]] = seconds

    def _count(self, now: EngineCounters, names: Sequence[str], rows: Rows) -> None:
        """Adds to OTHER_NAMESPACES the counts since the previous reading that no other series shows."""
        counted = now.numbers(COUNTED)
        total = now.values.sum(axis=0)[counted] + now.dropped[counted]
        shown = rows[:, counted]
        before = shown.copy()  # a namespace that just left OTHER_NAMESPACES is not credited with its counts there
        for place, name in enumerate(names):
            if name in self._shown:
                before[place] = self._shown[name]
            elif name not in self._places:
                before[place] = 0
        growth = np.where(shown >= before, shown - before, shown)  # a lower count: dropped and created again
        self._other += total - self._total - growth.sum(axis=0)
        self._total, self._shown = total, dict(zip(names, shown, strict=True))
