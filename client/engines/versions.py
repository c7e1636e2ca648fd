"""The epoch of an engine's weights, for requests that do not give one.

A response belongs to the weights that generated its end, because a trainer that changes them within a rollout needs the
newest tokens first. The first of these sources that is available decides:

1. the request's own epoch, an option;
2. the number at the end of the engine's weight version: "step7" is epoch 7. In vLLM it comes from
   `LLM.update_weight_version` or `finish_weight_update`, in SGLang with any update of weights;
3. how often the weights of this engine have changed. An engine does not know the changes before it started, so the
   server adds this count to the newest epoch that it knew then, unless a client gives explicit epochs. vLLM's adapter
   counts resets of the prefix cache, because every trainer resets it with new weights. Weights that generated no
   response do not count, so that several resets in a row are one change. If weight versions have names without a
   number, changes of the name count instead of resets.

Before the first change, the newest epoch of the namespace is right, because another engine may have run before.
"""

import re
from typing import NamedTuple

from histospec.protocol.limits import MAX_EPOCH

# The number stands alone, or behind a word or a separator: "7", "step7", "run-2/v7"; not "9f86d08" and not "2.5b".
NUMBERED = re.compile(r"(?:.*[^0-9A-Za-z.])?[A-Za-z]*([0-9]{1,19})", re.ASCII | re.DOTALL)


class Version(NamedTuple):
    """The version of an engine's weights.

    Attributes:
        epoch: their number; None if there is none.
        changes: how often they changed since the engine's first response.
    """

    epoch: int | None = None
    changes: int = 0


class WeightVersions:
    """Follows the version of an engine's weights from its events. It never decreases."""

    def __init__(self) -> None:
        self.current = Version()
        self._named: str | None = None  # the engine's weight version, if it was ever set
        self._numbered = True  # whether every version so far had a number
        self._used = False  # whether the present weights have generated a response

    def wrote(self) -> None:
        """Notes that a response ended."""
        self._used = True

    def reset(self) -> None:
        """Notes new weights without a version, such as a reset of the prefix cache; ignored if there are versions."""
        if self._named is None:
            self._change()

    def name(self, version: str) -> None:
        """Notes a new weight version of the engine."""
        if version == self._named:
            return
        self._named = version
        number = NUMBERED.fullmatch(version)
        epoch = int(number[1]) if number else None
        if epoch is None or epoch > MAX_EPOCH:  # a hash may end in a number by chance
            self._numbered = False
        self._change(max(epoch or 0, self.current.epoch or 0) if self._numbered else None)

    def _change(self, epoch: int | None = None) -> None:
        self.current = Version(epoch, self.current.changes + self._used)
        self._used = False
