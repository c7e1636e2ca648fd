"""Which weights an engine samples with, where its requests do not say it.

A response belongs to the weights that wrote its end: a trainer that changes them within a rollout wants the tokens of
the newest first. The first of these that is there decides:

1. the request's own epoch (`extra_args`);
2. the number at the end of vLLM's weight version: "step7" is epoch 7 (`LLM.update_weight_version`, or with the weights:
   `finish_weight_update`);
3. how often the weights changed under this engine. No engine knows how often before it started, so the server adds that
   to the newest epoch that it knew by then, where nobody names any. Every trainer resets the prefix cache with new
   weights, for what it holds was computed by the old ones; weights that wrote
   no response do not count, so that several resets in a row are one change. Where versions have names without a number,
   these count and resets do not.

Before the first change the newest epoch of the namespace is right: another engine may have been here before.
"""

import re
from typing import NamedTuple

from histospec.protocol.limits import MAX_EPOCH

# The number stands alone, or behind a word or a separator: "7", "step7", "run-2/v7"; not "9f86d08" and not "2.5b".
NUMBERED = re.compile(r"(?:.*[^0-9A-Za-z.])?[A-Za-z]*([0-9]{1,19})", re.ASCII | re.DOTALL)


class Version(NamedTuple):
    """The weights of an engine, as it can tell.

    Attributes:
        epoch: their number; None where nobody gave one.
        changes: how often they changed since the engine's first response.
    """

    epoch: int | None = None
    changes: int = 0


class WeightVersions:
    """Told what happens to the engine, answers which weights it samples with. Never goes back."""

    def __init__(self) -> None:
        self.current = Version()
        self._named: str | None = None  # vLLM's version, once somebody set it
        self._numbered = True  # as long as every version had a number
        self._used = False  # whether the present weights have written a response

    def wrote(self) -> None:
        """A response ended."""
        self._used = True

    def reset(self) -> None:
        """The prefix cache was emptied: there are new weights, unless versions say so themselves."""
        if self._named is None:
            self._change()

    def name(self, version: str) -> None:
        """vLLM was told the version of its weights."""
        if version == self._named:
            return
        self._named = version
        number = NUMBERED.fullmatch(version)
        epoch = int(number[1]) if number else None
        if epoch is None or epoch > MAX_EPOCH:  # hashes: some of them end in a number, by chance
            self._numbered = False
        self._change(max(epoch or 0, self.current.epoch or 0) if self._numbered else None)

    def _change(self, epoch: int | None = None) -> None:
        self.current = Version(epoch, self.current.changes + self._used)
        self._used = False
