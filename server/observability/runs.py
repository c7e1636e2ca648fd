"""The recent state of each run, which is a namespace: its contents, counters and gain from drafts."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from histospec.native import AGES
from histospec.protocol.costs import NOTHING_PAYS
from histospec.protocol.gains import VERIFIED, Gain, gain
from histospec.server.history.namespaces import Progress
from histospec.server.observability.engine_counters import EngineCounters
from histospec.server.observability.health_hints import NamespaceFacts
from histospec.server.observability.samples import RECENT

MAX_NAMESPACES = 50  # the largest ones are kept and listed
ENOUGH = 20  # sessions or steps; with fewer, no reason is given
MOST = 0.5  # a share from which it counts as the main reason
SOME_LATE = 0.1  # of the steps: after three late ones, a worker asks for no drafts for seconds
NEWEST_DRAFTED = f"{AGES[0]}.draft_tokens"  # of those from history, those from responses of the newest epoch
CONTENTS = ("sessions", "problems", "history_responses", "history_tokens", "bytes")
COUNTED = (
    "lookups_hit", "lookups_miss", "misnamed_lookups", "twins_hit", "twins_miss", "drafts_hit", "drafts_empty",
    "undrafted_tokens", "draft_tokens", "accepted_tokens", "generated_tokens", "history.draft_tokens",
    "history.accepted_tokens", NEWEST_DRAFTED, VERIFIED,
)  # fmt: skip

State = dict[str, dict[str, int]]
"""Numbers by namespace."""


class Runs:
    """The state of the largest namespaces, once per minute for the last ten minutes.

    Args:
        progress: returns the epochs of a namespace; the index may hold fewer. Called from any thread.

    """

    def __init__(self, progress: Callable[[str], Progress]) -> None:
        self._progress = progress
        self._states: deque[tuple[float, State]] = deque()
        self._costs: Mapping[str, float] = {}
        self._last_costs: dict[str, float] = {}
        """Includes namespaces without running sessions: why a finished run did not gain more is worth knowing."""
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

    def rows(self, late: float, late_ever: float) -> list[dict[str, Any]]:
        """Returns the largest namespaces first: contents, counters and gain since the start, and recent gain.

        `bytes` is 0 if the engine does not report it. `verify_cost` is None if no stream steps.

        Args:
            late: the share of this server's steps whose drafts were late, in the last ten minutes.
            late_ever: the same since the start.

        """
        return [self._row(name, now, late, late_ever) for name, now in self._states[-1][1].items()]

    def facts(self) -> list[NamespaceFacts]:
        """Returns the facts for hints."""
        return [self._facts(name, now) for name, now in self._states[-1][1].items()]

    def _row(self, name: str, now: Mapping[str, int], late: float, late_ever: float) -> dict[str, Any]:
        recently, cost = self._recently(name, now), self._last_costs.get(name)
        recent, total = gain(recently), gain(now)
        enough = recent.steps >= ENOUGH
        reason = why_not_more(
            recent if enough else total, recently if enough else now, cost, late if enough else late_ever,
            self._same_weights(name, now),
        )  # fmt: skip
        return {
            "name": name,
            "verify_cost": self._costs.get(name),
            "newest_epoch": self._newest(name, now),
            **{number: now[number] for number in (*CONTENTS, *COUNTED)},
            "gains": {"recent": recent._asdict(), "totals": total._asdict()},
            "why_not_more": reason,
        }

    def _facts(self, name: str, now: Mapping[str, int]) -> NamespaceFacts:
        recently, progress = self._recently(name, now), self._progress(name)
        return NamespaceFacts(
            name=name,
            hits=recently["lookups_hit"],
            misses=recently["lookups_miss"],
            misnamed=recently["misnamed_lookups"],
            newest_epoch=self._newest(name, now),
            history_responses=now["history_responses"],
            hits_ever=now["lookups_hit"],
            lookups_ever=now["lookups_hit"] + now["lookups_miss"],
            drafted=recently["history.draft_tokens"],
            accepted=recently["history.accepted_tokens"],
            same_weights=self._same_weights(name, now),
            behind=progress.behind,
            behind_epoch=progress.behind_epoch,
            verify_cost=self._costs.get(name),
        )

    def _newest(self, name: str, now: Mapping[str, int]) -> int:
        return max(now["newest_epoch"], self._progress(name).newest)

    def _same_weights(self, name: str, now: Mapping[str, int]) -> bool:
        """Returns whether the weights that generate have also written the text that drafts come from, mostly.

        That is so while the newest epoch stays, and drafts come from its responses.
        """
        recently, before = self._recently(name, now), self._states[0][1].get(name, now)
        drafted = recently if recently["draft_tokens"] else now
        older = drafted["history.draft_tokens"] - drafted[NEWEST_DRAFTED]
        return before["newest_epoch"] == now["newest_epoch"] and older < MOST * drafted["draft_tokens"]

    def _recently(self, name: str, now: Mapping[str, int]) -> dict[str, int]:
        """Returns the counts of the last ten minutes."""
        before = self._states[0][1].get(name, {})
        if any(now[number] < before.get(number, 0) for number in COUNTED):  # dropped and created again
            before = {}
        return {number: now[number] - before.get(number, 0) for number in COUNTED}


def why_not_more(
    some: Gain, counted: Mapping[str, float], verify_cost: float | None, late: float = 0.0, same_weights: bool = False
) -> str:
    """Returns the main limit of the gain in words; empty if none stands out or the sample is too small.

    Args:
        some: the gain in a period.
        counted: the counters of the same period.
        verify_cost: as last reported.
        late: the share of steps whose drafts were late.
        same_weights: whether the weights that generate have written the text that drafts come from.

    """
    lookups = counted["lookups_hit"] + counted["lookups_miss"]
    if some.steps < ENOUGH:
        return ""
    if verify_cost is not None and verify_cost >= NOTHING_PAYS:
        return f"verifying a draft token costs {verify_cost:.2f} of a step without drafts, so nothing is drafted"
    if (some.undrafted or 0) >= MOST:
        if late >= SOME_LATE:
            return f"{some.undrafted:.0%} of the steps ran without a draft, because drafts come too late"
        return (
            f"in {some.undrafted:.0%} of the steps, no draft was asked for: it would not have paid, or the worker did "
            "not reach this server"
        )
    if lookups >= ENOUGH and counted["misnamed_lookups"] >= MOST * lookups:
        share = counted["misnamed_lookups"] / lookups
        return f"{share:.0%} of the sessions have a prompt that is known under other problem ids"
    if lookups >= ENOUGH and some.known is not None and some.known < MOST:
        return f"{1 - some.known:.0%} of the sessions have a problem without history"
    if (some.empty or 0) >= MOST:
        return f"{some.empty:.0%} of the drafts are empty: no history matches these texts, or a draft would not pay"
    if some.acceptance is not None and some.acceptance < MOST:
        writer = "the same weights sample" if same_weights else "the policy writes"
        return f"{some.acceptance:.0%} of the draft tokens are accepted: {writer} other text than before"
    return ""
