"""The alternatives of sampled tokens, on their way from the sampler to the commit of their response.

    sampler (worker) ─► CoupledRows.alternatives ─► an attribute of ModelRunnerOutput ─► Gathered (scheduler) ─► commit

vLLM pickles a ModelRunnerOutput from the worker to the scheduler, with all its attributes. So the alternatives need no
message of their own, and vLLM's own log-probabilities, which users may ask for, stay as they are.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from histospec.client.engines.alternatives import Step
from histospec.protocol.alternatives import ABSENT, HIGHEST, LEAST, LEVELS_PER_NAT, MOST, TOKENS

if TYPE_CHECKING:  # type checkers would take minutes for torch; the scheduler's process needs none here
    Tensor = Any

ATTRIBUTE = "_histospec_alternatives"
"""Of a ModelRunnerOutput: {request id: Step}, of the requests with a seed."""


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
