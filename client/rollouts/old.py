"""The old response that a rollout starts from: which one, and how much of it could be written under today's limits."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.values import Response


class ResponseLimits(NamedTuple):
    """When a response to one prompt ends."""

    most: int
    """Tokens that it may have."""
    scored: int
    """Tokens that vLLM can score: it always wants room to generate one more."""
    least: int
    """Tokens before which no stop token may come."""
    stops: frozenset[int]


@dataclass(frozen=True, eq=False)
class Old:
    """An old response, cut to what could be written today."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    epoch: int | None
    ended: bool
    """Whether a response with these tokens is complete: it stops here, or has reached its limit."""


def choose(responses: Iterable[Response], count: int, epoch: int | None) -> list[Response]:
    """At most `count` responses to start from, newest epoch first. No two rollouts share one.

    Only those that the policy wrote as a whole (no tool turns), with the logprobs that it had then. Where the epoch is
    known, responses of the same epoch are the new ones' siblings and do not count.
    """
    usable = [
        r
        for r in responses
        if r.logprobs is not None
        and (r.generated is None or bool(np.all(r.generated)))
        and (epoch is None or r.epoch is None or r.epoch < epoch)
    ]
    usable.reverse()  # the newest of an epoch first
    usable.sort(key=lambda r: -1 if r.epoch is None else r.epoch, reverse=True)
    return usable[:count]


def cut(response: Response, limits: ResponseLimits) -> Old | None:
    """The response under today's limits; None where nothing of it can be scored."""
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
