"""The lenience of an epoch towards old responses: one number, or a schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Lenience: TypeAlias = float | Callable[[int], float]
"""A number of at least 0, or a function that returns one for an epoch. 0 reuses nothing, 1 is the plain ratio of the
policies, math.inf keeps all tokens that the current policy can generate."""


@dataclass(frozen=True)
class Geometric:
    """A schedule that changes the lenience by the same factor in each epoch.

    The lenience is `start` in epoch 0 and `end` from epoch `epochs` on. Its logarithm changes linearly, so a schedule
    can be lenient in early epochs and stricter later, or the reverse.

    Raises:
        ValueError: start or end is not a finite number above 0, or epochs is less than 1.
    """

    start: float
    end: float
    epochs: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: is {getattr(self, name)}, must be a finite number above 0")
        if self.epochs < 1:
            raise ValueError(f"epochs: is {self.epochs}, must be at least 1")

    def __call__(self, epoch: int) -> float:
        """Returns the lenience of an epoch."""
        return float(self.start * math.exp(math.log(self.end / self.start) * min(1.0, epoch / self.epochs)))


def lenience_of(lenience: Lenience, epoch: int | None) -> float:
    """Returns the lenience of an epoch as a number.

    Raises:
        ValueError: it is negative or not a number, or it is a schedule and the epoch is None.
    """
    if callable(lenience):
        if epoch is None:
            raise ValueError("epoch: is None; a schedule of the lenience needs an epoch")
        lenience = lenience(epoch)
    if not lenience >= 0:
        raise ValueError(f"lenience: is {lenience}, must be a number of at least 0")
    return float(lenience)
