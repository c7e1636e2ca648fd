"""Says in the log that finished responses were dropped: the first of a shard at once, then one line a minute."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("histospec.client")

PAUSE = 60.0
"""Seconds between two lines about one shard."""


@dataclass(slots=True)
class _Unsaid:
    due: float
    """When the next line may come, on the monotonic clock."""
    responses: int = 0
    tokens: int = 0
    reason: str = ""


class Losses:
    """What was dropped, by shard. Not thread-safe; its owner locks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shards: dict[str, _Unsaid] = {}

    def note(self, shard: str, tokens: int, reason: str) -> None:
        """A response of so many tokens was dropped."""
        unsaid = self._shards.setdefault(shard, _Unsaid(due=self._clock()))
        unsaid.responses += 1
        unsaid.tokens += tokens
        unsaid.reason = reason
        self.report()

    def report(self, all_of_them: bool = False) -> None:
        """Says what is due, or all that was not said yet."""
        for shard, unsaid in self._shards.items():
            now = self._clock()
            if not unsaid.responses or not (all_of_them or now >= unsaid.due):
                continue
            what = "a finished response" if unsaid.responses == 1 else f"{unsaid.responses} finished responses"
            log.warning("%s: dropped %s of %d tokens: %s", shard, what, unsaid.tokens, unsaid.reason)
            self._shards[shard] = _Unsaid(due=now + PAUSE)
