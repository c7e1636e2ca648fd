"""How lenient an epoch is towards old responses: one number, or a schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Lenience: TypeAlias = float | Callable[[int], float]
"""A number of at least 0, or a function from the epoch to one. 0 reuses nothing, 1 is the plain ratio of the policies,
math.inf keeps all that the current policy can write."""


@dataclass(frozen=True)
class Geometric:
    """From `start` in epoch 0 to `end` in epoch `epochs` and after, by the same factor each epoch.

    The log-ratio that is forgiven, log(lenience), then moves in a straight line: lenient while little is at stake,
    stricter as the policy gets good, or the other way round.

    Raises:
        ValueError: start and end are not finite numbers above 0, or epochs is below 1.
    """

    start: float
    end: float
    epochs: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is not a finite number above 0")
        if self.epochs < 1:
            raise ValueError(f"epochs: {self.epochs} is below 1")

    def __call__(self, epoch: int) -> float:
        """The lenience of an epoch."""
        return float(self.start * math.exp(math.log(self.end / self.start) * min(1.0, epoch / self.epochs)))


def lenience_of(lenience: Lenience, epoch: int | None) -> float:
    """The number for this epoch.

    Raises:
        ValueError: it is negative or not a number, or a schedule has no epoch to go by.
    """
    if callable(lenience):
        if epoch is None:
            raise ValueError("epoch: a schedule of the lenience needs one")
        lenience = lenience(epoch)
    if not lenience >= 0:
        raise ValueError(f"lenience: {lenience} is not a number of at least 0")
    return float(lenience)
