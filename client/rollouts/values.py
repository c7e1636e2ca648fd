"""The values that a rollout returns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Rollout:
    """One new response: the kept prefix of an old response, and what the current policy generated after it."""

    tokens: NDArray[np.int32]
    """int32[n]"""
    logprobs: NDArray[np.float32]
    """float32[n]: log-probability of every token under the current policy, the reused ones included."""
    reused: int
    """How many tokens, from the first on, come from the old response."""
    generated: int
    """How many tokens the current policy generated; n = reused + generated."""
    finish_reason: str
    """"stop" if it ends with a stop token, "length" if it reached its limit, as in vLLM."""
    prompt: NDArray[np.int32]
    """int32[m]"""
    problem: str | None = None
    """The explicit problem id given to `generate`."""
    epoch: int | None = None
    """The epoch given to `generate`."""
    old_epoch: int | None = None
    """The epoch of the old response; None if there was none."""
    trusted: bool = True
    """Whether `logprobs` belong to the distribution that the response was sampled from. If not, they are not stored."""


@dataclass
class Report:
    """What one call of `SpeculativeRollout.generate` did, and how long each part took."""

    lenience: float
    rollouts: int = 0
    tried: int = 0
    """Rollouts with an old response."""
    whole: int = 0
    """Rollouts for which nothing had to be generated."""
    scored_tokens: int = 0
    """Tokens of old responses that the current policy scored."""
    reused_tokens: int = 0
    generated_tokens: int = 0
    foreign: int = 0
    """Old responses with a token outside the model's vocabulary. They are not reused."""
    unreachable: int = 0
    """Problems whose history could not be fetched. Their rollouts were generated without reuse."""
    seconds_fetching: float = 0.0
    """Fetching old responses from the server."""
    seconds_scoring: float = 0.0
    """Verification: vLLM scores the old responses, and the accepted prefixes are cut."""
    seconds_generating: float = 0.0
    """Rollout: vLLM generates the rest."""
    seconds_assembling: float = 0.0
    seconds_ingesting: float = 0.0

    @property
    def share_reused(self) -> float:
        """Share of reused tokens among all tokens of the new responses, from 0 to 1."""
        return self.reused_tokens / max(1, self.reused_tokens + self.generated_tokens)
