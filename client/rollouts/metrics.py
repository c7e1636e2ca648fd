"""What drafts gave the rollouts of a training step, for the trainer's logger."""

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from histospec.client.errors import HistoSpecError
from histospec.protocol.gains import gain

if TYPE_CHECKING:
    from histospec.client.sync import DraftClient

log = logging.getLogger("histospec.client")

COUNTED = (
    "lookups_hit", "lookups_miss", "drafts_hit", "drafts_empty", "undrafted_tokens", "draft_tokens", "accepted_tokens",
    "generated_tokens", "model_draft_tokens", "model_accepted_tokens",
)  # fmt: skip
"""Numbers of `NamespaceFacts` that only grow while a shard runs."""

NAMES = ("accept_rate", "tokens_per_step", "cache_hit_rate", "draft_share", "model_accept_rate")


class RolloutMetrics:
    """Metrics of a namespace since the last call, from the counters of the draft server::

        drafts = RolloutMetrics(DraftClient())     # before the first rollouts
        metrics.update(drafts.collect())           # after the rollouts of each step

    They count every request of the namespace that had a session, on all workers. Not thread-safe.

    Args:
        client: its namespace is the run's.
        prefix: the beginning of each name.
        timeout: how many seconds a call may wait for a shard. A shard that does not answer costs the metrics of one
            step; the next call covers both steps.
    """

    def __init__(self, client: "DraftClient", prefix: str = "histospec/", timeout: float = 2.0) -> None:
        self._client = client
        self._prefix = prefix
        self._timeout = timeout
        self._counted: Counter[str] = Counter()
        self._paused = False
        self._silent = False
        self._collected = time.monotonic()
        self._found: dict[str, float | None] = dict.fromkeys(NAMES)
        self._before = self._read()

    def collect(self, every: float = 0.0, absent: float | None = None) -> dict[str, float]:
        """Returns the metrics since the last call. Never raises because of the server.

        Args:
            every: until this many seconds after a call, returns the result of that call again. For places that do not
                know when a step ends.
            absent: value of a metric without observations; without a draft there is no acceptance rate. None: such a
                metric is left out.

        Returns:
            By name, after the prefix: `accept_rate`, accepted tokens as a share of the tokens that the server drafted;
                `tokens_per_step`, generated tokens per forward pass of a request; `cache_hit_rate`, the share of
                sessions whose problem had history; `draft_share`, the share of forward passes for which the server
                had a draft; `model_accept_rate`, the acceptance rate of the model's own drafter.
        """
        if time.monotonic() - self._collected >= every:
            self._advance()
            counted, self._counted, self._collected = self._counted, Counter(), time.monotonic()
            self._found = _ratios(counted)
        found = {name: absent if value is None else value for name, value in self._found.items()}
        return {f"{self._prefix}{name}": value for name, value in found.items() if value is not None}

    def pause(self) -> None:
        """Leaves out what follows until `resume`, such as validation."""
        self._advance()
        self._paused = True

    def resume(self) -> None:
        """Counts again after `pause`."""
        self._advance()
        self._paused = False

    def _advance(self) -> None:
        """Reads the counters. Adds what they counted since the last reading, unless paused."""
        now = self._read()
        if now is None:
            if self._paused:  # what went on meanwhile must not count later
                self._before = None
            return
        if self._before is not None and not self._paused:
            for shard, counters in now.items():
                before = self._before.get(shard)
                if before is not None and all(counters[name] >= before[name] for name in COUNTED):
                    counters = {name: counters[name] - before[name] for name in COUNTED}
                self._counted.update(counters)  # of a shard that is new or has restarted: all
        self._before = now

    def _read(self) -> dict[str, dict[str, int]] | None:
        """Returns the counters by shard; None if a shard does not answer."""
        try:
            told = self._client.inspect(self._timeout)
        except HistoSpecError as error:
            if not self._silent:
                log.warning("HistoSpec: no metrics of drafts until all shards answer: %s", error)
            self._silent = True
            return None
        self._silent = False
        return {
            shard.shard: {name: 0 if shard.namespace is None else getattr(shard.namespace, name) for name in COUNTED}
            for shard in told
        }


def _ratios(counted: Counter[str]) -> dict[str, float | None]:
    drafted = counted["model_draft_tokens"]
    some = gain({**dict.fromkeys(COUNTED, 0), **counted})
    share = counted["drafts_hit"] / some.steps if some.steps else None
    model = counted["model_accepted_tokens"] / drafted if drafted else None
    return dict(zip(NAMES, (some.acceptance, some.tokens_per_step, some.known, share, model), strict=True))
