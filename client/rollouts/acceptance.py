"""The prefix of an old response that the current policy accepts: Algorithm 1 of SPEC-RL (arXiv 2509.23232).

The lenience towards old responses is one number, or a schedule over epochs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


def accept_prefix(new_logprobs: Any, old_logprobs: Any, lenience: float, uniforms: Any) -> int:
    """Returns how many tokens of an old response are kept: those before the first rejected one.

    Token i is kept if `uniforms[i] <= min(1, lenience * exp(new_logprobs[i] - old_logprobs[i]))`. With infinite
    lenience every token with a probability above 0 under the current policy is kept. A token is rejected if the product
    is undefined: infinite lenience times probability 0, or 0 / 0 if both policies give the token probability 0.

    Args:
        new_logprobs: float[n], log-probability of each old token under the current policy; -inf is probability 0.
        old_logprobs: float[n], the same under the policy that sampled it.
        lenience: above 0. 1 is the plain ratio of the policies; a larger value keeps more tokens; math.inf keeps all
            tokens that the current policy can generate.
        uniforms: float[n], independent draws from [0, 1).

    Returns:
        The length of the prefix, from 0 to n.

    Raises:
        ValueError: an argument is malformed; the message names it.
    """
    new, old = _logprobs("new_logprobs", new_logprobs), _logprobs("old_logprobs", old_logprobs)
    draws = _floats("uniforms", uniforms)
    for name, array in (("old_logprobs", old), ("uniforms", draws)):
        if len(array) != len(new):
            raise ValueError(f"{name}: {len(array)} values for {len(new)} of new_logprobs")
    outside = ~((draws >= 0) & (draws < 1))
    if outside.any():
        raise ValueError(f"uniforms: value {int(outside.argmax())}, {draws[outside][0]}, is outside [0, 1)")
    if not lenience > 0:
        raise ValueError(f"lenience: is {lenience}, must be a number above 0")
    with np.errstate(invalid="ignore"):  # inf - inf is nan, and no draw is below nan
        log_ratio = math.log(lenience) + (new - old)
        rejected = ~(draws <= np.exp(np.minimum(log_ratio, 0)))
    return int(rejected.argmax()) if rejected.any() else len(new)


def accept_until_wrong(new_logprobs: Any, old_logprobs: Any, lenience: float, uniforms: Any) -> int:
    """Returns what `accept_prefix` does, but rejects a token with a value that is no log-probability.

    A policy that diverges scores tokens with NaN. That is no reason to end a run.
    """
    new, old = _floats("new_logprobs", new_logprobs), _floats("old_logprobs", old_logprobs)
    wrong = ~((new < np.inf) & (old < np.inf))  # NaN, too
    end = int(wrong.argmax()) if wrong.any() else len(new)
    return accept_prefix(new[:end], old[:end], lenience, uniforms[:end])


def _logprobs(name: str, value: Any) -> NDArray[np.float64]:
    array = _floats(name, value)
    wrong = np.isnan(array) | (array == np.inf)
    if wrong.any():
        raise ValueError(f"{name}: value {int(wrong.argmax())} is {array[wrong][0]}, not a log-probability")
    return array


def _floats(name: str, value: Any) -> NDArray[np.float64]:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be numbers, {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{name}: must be one-dimensional, has shape {array.shape}")
    return array
