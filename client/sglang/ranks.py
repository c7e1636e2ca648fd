"""The tensor-parallel ranks of an engine: each has a scheduler of its own, and all must verify the same drafts.

The first rank asks the server. In every step it hands the drafts on to the others, over SGLang's own group of CPU
processes, also if there are none: the others wait for them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NONE = -1  # no token


class Ranks:
    """The ranks of one engine."""

    def __init__(self, group: Any, places: int) -> None:
        """Takes SGLang's group of tensor-parallel ranks, and the number of places of a request."""
        self._group = group
        self._places = places
        self.leads: bool = group.rank_in_group == 0

    def share(self, rows: Sequence[Sequence[int]], requests: int) -> Sequence[Sequence[int]]:
        """Returns the first rank's drafts in every rank.

        Args:
            rows: in the first rank, the draft of each request; others give none.
            requests: their number, the same in every rank.
        """
        if self._group.world_size == 1:
            return rows
        import torch

        shared = torch.from_numpy(_packed(rows, requests, self._places - 1))
        torch.distributed.broadcast(shared, src=self._group.ranks[0], group=self._group.cpu_group)
        return [row[row != NONE].tolist() for row in shared.numpy()]


def _packed(rows: Sequence[Sequence[int]], requests: int, longest: int) -> NDArray[np.int64]:
    packed = np.full((requests, longest), NONE, np.int64)
    for into, row in zip(packed, rows, strict=False):
        into[: len(row)] = row[:longest]
    return packed
