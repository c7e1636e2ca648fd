"""The recent state of each run, which is a namespace: its contents, counters and gain from drafts."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from histospec.protocol.costs import NOTHING_PAYS
from histospec.protocol.gains import MODEL_DRAFTED, Gain, gain
from histospec.server.observability.engine_counters import EngineCounters
from histospec.server.observability.health_hints import NamespaceFacts
from histospec.server.observability.samples import RECENT

MAX_NAMESPACES = 50  # the largest ones are kept and listed
ENOUGH = 20  # sessions or steps; with fewer, no reason is given
MOST = 0.5  # a share from which it counts as the main reason
CONTENTS = ("sessions", "problems", "history_responses", "history_tokens", "bytes")
COUNTED = (
    "lookups_hit", "lookups_miss", "twins_hit", "twins_miss", "drafts_hit", "drafts_empty", "undrafted_tokens",
    "draft_tokens", "accepted_tokens", "generated_tokens", "history.draft_tokens", "history.accepted_tokens",
    MODEL_DRAFTED,
)  # fmt: skip

State = dict[str, dict[str, int]]
"""Numbers by namespace."""


class Runs:
    """The state of the largest namespaces, once per minute for the last ten minutes.

    Args:
        newest_epoch: returns the newest epoch of a namespace; the index may hold fewer. Called from any thread.

    """

    def __init__(self, newest_epoch: Callable[[str], int]) -> None:
        self._newest_epoch = newest_epoch
        self._states: deque[tuple[float, State]] = deque()
        self._costs: Mapping[str, float] = {}
        self._last_costs: dict[str, float] = {}
        """Includes namespaces without running sessions, because the gain of a finished run is worth knowing."""
        self.in_all = 0

    def add(self, now: float, counted: EngineCounters) -> None:
        """Keeps the newest state and one per minute before it. Removes namespaces that are gone."""
        largest = np.lexsort((counted.column("history_tokens"), counted.column("sessions") > 0))[::-1]
        rows = {counted.namespaces[i]: counted.row(i) for i in largest[:MAX_NAMESPACES].tolist()}
        states = self._states
        if len(states) > 1 and states[-1][0] - states[-2][0] < RECENT / 10:
            states.pop()
        there = set(counted.namespaces)
        for _, state in states:
            for gone in state.keys() - there:
                del state[gone]
        states.append((now, rows))
        while states[0][0] < now - RECENT:
            states.popleft()
        self.in_all = len(there)
        self._costs = counted.verify_costs
        last = self._last_costs | counted.verify_costs
        self._last_costs = {name: cost for name, cost in last.items() if name in rows}

    def rows(self) -> list[dict[str, Any]]:
        """Returns the largest namespaces first: contents, counters and gain since the start, and recent gain.

        `bytes` is 0 if the engine does not report it. `verify_cost` is None if no stream steps.
        """
        return [self._row(name, now) for name, now in self._states[-1][1].items()]

    def facts(self) -> list[NamespaceFacts]:
        """Returns the facts for hints."""
        return [self._facts(name, now) for name, now in self._states[-1][1].items()]

    def _row(self, name: str, now: Mapping[str, int]) -> dict[str, Any]:
        recently, cost = self._recently(name, now), self._last_costs.get(name)
        recent, total = gain(recently, cost), gain(now, cost)
        judged, counted = (recent, recently) if recent.steps >= ENOUGH else (total, now)
        return {
            "name": name,
            "verify_cost": self._costs.get(name),
            "newest_epoch": self._newest(name, now),
            **{number: now[number] for number in (*CONTENTS, *COUNTED)},
            "gains": {"recent": recent._asdict(), "totals": total._asdict()},
            "why_not_more": why_not_more(judged, counted["lookups_hit"] + counted["lookups_miss"], cost),
        }

    def _facts(self, name: str, now: Mapping[str, int]) -> NamespaceFacts:
        recently = self._recently(name, now)
        return NamespaceFacts(
            name=name,
            hits=recently["lookups_hit"],
            misses=recently["lookups_miss"],
            newest_epoch=self._newest(name, now),
            history_responses=now["history_responses"],
            hits_ever=now["lookups_hit"],
            lookups_ever=now["lookups_hit"] + now["lookups_miss"],
            drafted=recently["history.draft_tokens"],
            accepted=recently["history.accepted_tokens"],
            verify_cost=self._costs.get(name),
        )

    def _newest(self, name: str, now: Mapping[str, int]) -> int:
        return max(now["newest_epoch"], self._newest_epoch(name))

    def _recently(self, name: str, now: Mapping[str, int]) -> dict[str, int]:
        """Returns the counts of the last ten minutes."""
        before = self._states[0][1].get(name, {})
        if any(now[number] < before.get(number, 0) for number in COUNTED):  # dropped and created again
            before = {}
        return {number: now[number] - before.get(number, 0) for number in COUNTED}


def why_not_more(some: Gain, lookups: float, verify_cost: float | None) -> str:
    """Returns the main limit of the gain in words; empty if none stands out or the sample is too small.

    `lookups`: sessions opened in the same period.
    """
    if some.steps < ENOUGH:
        return ""
    if verify_cost is not None and verify_cost >= NOTHING_PAYS:
        return f"verifying a draft token costs {verify_cost:.2f} of a step without drafts, so nothing is drafted"
    if (some.undrafted or 0) >= MOST:
        return f"in {some.undrafted:.0%} of the steps, no draft was asked for, or it came too late"
    if lookups >= ENOUGH and some.known is not None and some.known < MOST:
        return f"{1 - some.known:.0%} of the sessions have a problem without history"
    if (some.empty or 0) >= MOST:
        return f"{some.empty:.0%} of the drafts are empty: no history matches these texts, or a draft would not pay"
    if some.acceptance is not None and some.acceptance < MOST:
        return f"{some.acceptance:.0%} of the draft tokens are accepted: the policy writes other text than before"
    return ""
