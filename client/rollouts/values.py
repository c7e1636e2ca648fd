"""What a rollout gives back."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Rollout:
    """One new response: a prefix of an old one that survived, and what the current policy wrote after it."""

    tokens: NDArray[np.int32]
    """int32[n]"""
    logprobs: NDArray[np.float32]
    """float32[n]: log-probability of every token under the current policy, the reused ones included."""
    reused: int
    """How many tokens, from the first on, are those of the old response."""
    generated: int
    """How many the current policy wrote; n = reused + generated."""
    finish_reason: str
    """"stop" where it ends with a stop token, "length" where it reached its limit: as vLLM says."""
    prompt: NDArray[np.int32]
    """int32[m]"""
    problem: str | None = None
    """The explicit problem id that was given for it."""
    epoch: int | None = None
    """The epoch that was given for it."""
    old_epoch: int | None = None
    """The epoch of the old response that was tried; None: there was none."""
    trusted: bool = True
    """Whether `logprobs` are those of the distribution that it was sampled from, and so worth keeping."""


@dataclass
class Report:
    """What one call of `SpeculativeRollout.generate` did, and how long each part took."""

    lenience: float
    rollouts: int = 0
    tried: int = 0
    """Rollouts that had an old response to try."""
    whole: int = 0
    """Of these, the ones for which nothing had to be generated."""
    scored_tokens: int = 0
    """Tokens of old responses that the current policy scored."""
    reused_tokens: int = 0
    generated_tokens: int = 0
    unreachable: int = 0
    """Problems whose history could not be fetched: their rollouts were generated as a whole."""
    seconds_fetching: float = 0.0
    """Old responses, from the server."""
    seconds_scoring: float = 0.0
    """Verification: vLLM scores the old responses, and what survives is cut."""
    seconds_generating: float = 0.0
    """Rollout: vLLM writes the ends."""
    seconds_assembling: float = 0.0
    seconds_ingesting: float = 0.0

    @property
    def share_reused(self) -> float:
        """Reused tokens among all tokens of the new responses, from 0 to 1."""
        return self.reused_tokens / max(1, self.reused_tokens + self.generated_tokens)
