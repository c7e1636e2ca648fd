"""Chooses the old response that a rollout starts from, and cuts it to the present limits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.values import Response


class ResponseLimits(NamedTuple):
    """The limits of a response to one prompt."""

    most: int
    """How many tokens it may have."""
    scored: int
    """How many tokens vLLM can score; it always needs room to generate one more."""
    least: int
    """How many tokens must come before a stop token."""
    stops: frozenset[int]
    """The stop tokens."""


@dataclass(frozen=True, eq=False)
class Old:
    """An old response, cut to the present limits."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    epoch: int | None
    ended: bool
    """Whether a response with these tokens is complete: it ends with a stop token, or has reached its limit."""


def outside(response: Response, vocabulary: int) -> int | None:
    """Returns the first token that a model with this many tokens does not have; None if it has all."""
    tokens = np.asarray(response.tokens, np.int32)
    wrong = tokens[tokens >= vocabulary]
    return int(wrong[0]) if len(wrong) else None


def not_reused(token: int, vocabulary: int) -> str:
    """Returns a sentence for the log about responses with a token that the model does not have."""
    return (
        f"an old response has the token {token}, and the model has {vocabulary} tokens; such responses are not reused. "
        "Give each model and tokenizer a namespace of its own"
    )


def choose(responses: Iterable[Response], count: int, epoch: int | None) -> list[Response]:
    """Returns at most `count` responses to start from, newest epoch first, one for each rollout.

    A response is usable if the policy generated all of it (no tool turns) and its logprobs are known. If `epoch` is
    given, it must also be of an earlier epoch, because responses of the same epoch are siblings of the new ones.
    """
    usable = [
        r
        for r in responses
        if r.logprobs is not None
        and (r.generated is None or bool(np.all(r.generated)))
        and (epoch is None or r.epoch is None or r.epoch < epoch)
    ]
    usable.reverse()  # newest first within an epoch
    usable.sort(key=lambda r: -1 if r.epoch is None else r.epoch, reverse=True)
    return usable[:count]


def cut(response: Response, limits: ResponseLimits) -> Old | None:
    """Returns the response cut to the limits; None if nothing of it can be scored."""
    tokens = np.asarray(response.tokens, np.int32)[: limits.most]
    ended = len(tokens) == limits.most
    stops = np.isin(tokens, list(limits.stops)).nonzero()[0]
    if len(stops):
        end = int(stops[0])
        allowed = end >= limits.least
        tokens, ended = tokens[: end + allowed], allowed
    if len(tokens) > limits.scored:
        tokens, ended = tokens[: limits.scored], False
    if not len(tokens):
        return None
    logprobs = np.asarray(response.logprobs, np.float32)[: len(tokens)]
    return Old(tokens, logprobs, response.epoch, ended)
