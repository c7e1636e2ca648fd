"""The tensor-parallel ranks of an engine: each has a scheduler of its own, and all must verify the same drafts.

The first rank asks the server. In every step it hands the drafts on to the others, over SGLang's own group of CPU
processes, also if there are none: the others wait for them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Ranks:
    """The ranks of one engine."""

    def __init__(self, group: Any) -> None:
        """Takes SGLang's group of tensor-parallel ranks."""
        self._group = group
        self.leads: bool = group.rank_in_group == 0

    def share(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first rank's array in every rank. All give one of the same shape; the others' are overwritten."""
        if self._group.world_size > 1:
            import torch

            shared = torch.from_numpy(chosen)
            torch.distributed.broadcast(shared, src=self._group.ranks[0], group=self._group.cpu_group)
        return chosen
