"""The alternatives of sampled tokens, on their way from the sampler to the commit of their response.

    sampler (worker) ─► CoupledRows.alternatives ─► an attribute of ModelRunnerOutput ─► Gathered (scheduler) ─► commit

vLLM pickles a ModelRunnerOutput from the worker to the scheduler, with all its attributes. So the alternatives need no
message of their own, and vLLM's own log-probabilities, which users may ask for, stay as they are.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from histospec.protocol.alternatives import ABSENT, HIGHEST, LEAST, LEVELS_PER_NAT, MOST, TOKENS, joined

if TYPE_CHECKING:  # type checkers would take minutes for torch; the scheduler's process needs none here
    Tensor = Any

ATTRIBUTE = "_histospec_alternatives"
"""Of a ModelRunnerOutput: {request id: Step}, of the requests with a seed."""


class Step(NamedTuple):
    """The alternatives of the tokens that a request got in one step."""

    counts: bytes
    """uint8, one per token."""
    groups: bytes
    """As in `histospec.protocol.alternatives`."""


class Weighed(NamedTuple):
    """Chosen tokens, and the most probable tokens of their rows."""

    tokens: "Tensor"
    """int64[n]"""
    own: "Tensor"
    """float32[n]: the logits of the chosen tokens"""
    likely: "Tensor"
    """float32[n, MOST + 1]: the largest logits of each row; -inf where the vocabulary has fewer"""
    which: "Tensor"
    """int64[n, MOST + 1]: their tokens"""
    total: "Tensor"
    """float32[n]: the logarithm of the sum of exp(logit) over the row"""


def words(weighed: Weighed) -> "Tensor":
    """Returns for each row the level of its chosen token, then MOST alternatives as `token << 8 | level` or ABSENT.

    An alternative has a probability of at least LEAST. int64[n, 1 + MOST], on the device of the logits.
    """
    log_p = weighed.likely - weighed.total[:, None]
    other = (weighed.which != weighed.tokens[:, None]) & (weighed.which < TOKENS) & (log_p >= float(np.log(LEAST)))
    best, at = log_p.masked_fill(~other, float("-inf")).topk(MOST)
    tokens = weighed.which.gather(1, at)
    alternatives = (tokens << 8 | _levels(best)).masked_fill(best == float("-inf"), ABSENT)
    own = _levels(weighed.own - weighed.total)
    result: Tensor = own.new_empty((len(own), 1 + MOST))
    result[:, 0], result[:, 1:] = own, alternatives
    return result


def _levels(log_p: "Tensor") -> "Tensor":
    """Returns int64 levels; the highest for -inf."""
    return (log_p * -LEVELS_PER_NAT).round().clamp(0, HIGHEST).long()


def of(output: Any) -> Mapping[str, Step]:
    """Returns the alternatives in a ModelRunnerOutput, by request; usually none."""
    found: Mapping[str, Step] = getattr(output, ATTRIBUTE, None) or {}
    return found


class Gathered:
    """The alternatives of a running request, step by step."""

    def __init__(self) -> None:
        self._counts = bytearray()
        self._groups = bytearray()

    def put(self, start: int, step: Step) -> None:
        """Adds those of the tokens from `start` on, in place of those that it has there: vLLM may discard tokens."""
        self._cut(start)
        self._counts.extend(bytes(start - len(self._counts)))
        self._counts += step.counts
        self._groups += step.groups

    def packed(self, before: int, tokens: int) -> bytes | None:
        """Returns those of a response of `tokens` tokens, of which the request did not sample the first `before`."""
        self._cut(tokens - before)
        if not self._groups:
            return None
        counts = np.zeros(tokens, np.uint8)
        counts[before : before + len(self._counts)] = self._counts
        return joined(counts, bytes(self._groups))

    def _cut(self, tokens: int) -> None:
        gone = self._counts[max(tokens, 0) :]
        if size := sum(1 + 4 * count for count in gone if count):
            del self._groups[-size:]
        del self._counts[max(tokens, 0) :]
