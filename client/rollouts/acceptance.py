"""The prefix of an old response that the current policy accepts: Algorithm 1 of SPEC-RL (arXiv 2509.23232)."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
