"""Are predicted probabilities true? Every drafted token that was verified is one observation.

A token is verified when all before it in its draft were accepted: those that are accepted, and the first that is not.
What comes after a rejection was never asked, and neither was what reaches beyond the end of the recorded text.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Verified:
    """Observations: float32[n] the predicted probability of acceptance, bool[n] whether the token was accepted."""

    predicted: npt.NDArray[np.float32]
    accepted: npt.NDArray[np.bool_]

    @staticmethod
    def none() -> "Verified":
        """No observation."""
        return Verified(np.empty(0, np.float32), np.empty(0, np.bool_))

    @staticmethod
    def joined(parts: Iterable["Verified"]) -> "Verified":
        """The observations of all parts."""
        parts = [Verified.none(), *parts]
        return Verified(np.concatenate([p.predicted for p in parts]), np.concatenate([p.accepted for p in parts]))


@dataclass(frozen=True)
class Decile:
    """The observations whose predicted probability lies in [low, high).

    Attributes:
        low, high: the limits, a tenth apart; the last decile includes 1.
        tokens: how many observations there are, at least 1.
        predicted: their mean predicted probability.
        observed: the part of them that was accepted.

    """

    low: float
    high: float
    tokens: int
    predicted: float
    observed: float

    def margin(self) -> float:
        """Half a 95 % interval of `observed` as far as chance alone moves it (Wilson's, widest side)."""
        z, n = 1.96, self.tokens
        spread = z * np.sqrt(self.observed * (1 - self.observed) / n + (z / (2 * n)) ** 2)
        return float((spread + abs(0.5 - self.observed) * z * z / n) / (1 + z * z / n))


def deciles(verified: Verified) -> list[Decile]:
    """The deciles that hold an observation, lowest first."""
    places = np.minimum((verified.predicted * 10).astype(np.int64), 9)
    counts = np.bincount(places, minlength=10)
    predicted = np.bincount(places, weights=verified.predicted, minlength=10)
    accepted = np.bincount(places, weights=verified.accepted, minlength=10)
    return [
        Decile(i / 10, (i + 1) / 10, int(n), float(predicted[i] / n), float(accepted[i] / n))
        for i, n in enumerate(counts)
        if n
    ]
