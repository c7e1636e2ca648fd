"""Compares predicted probabilities with outcomes. Every verified draft token is one observation.

A token is verified if all tokens before it in its draft were accepted: the accepted tokens and the first rejected one.
Tokens after a rejection, or beyond the end of the recorded text, are not verified.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Verified:
    """Observations: float32[n] predicted probabilities of acceptance, bool[n] whether each token was accepted."""

    predicted: npt.NDArray[np.float32]
    accepted: npt.NDArray[np.bool_]

    @staticmethod
    def none() -> "Verified":
        """Returns no observations."""
        return Verified(np.empty(0, np.float32), np.empty(0, np.bool_))

    @staticmethod
    def joined(parts: Iterable["Verified"]) -> "Verified":
        """Returns the observations of all parts."""
        parts = [Verified.none(), *parts]
        return Verified(np.concatenate([p.predicted for p in parts]), np.concatenate([p.accepted for p in parts]))


@dataclass(frozen=True)
class Decile:
    """The observations with a predicted probability in [low, high).

    Attributes:
        low, high: the bounds, a tenth apart; the last decile includes 1.
        tokens: number of observations, at least 1.
        predicted: their mean predicted probability.
        observed: the share that was accepted.

    """

    low: float
    high: float
    tokens: int
    predicted: float
    observed: float

    def margin(self) -> float:
        """Half a 95 % interval of `observed` from chance alone (Wilson's, wider side)."""
        z, n = 1.96, self.tokens
        spread = z * np.sqrt(self.observed * (1 - self.observed) / n + (z / (2 * n)) ** 2)
        return float((spread + abs(0.5 - self.observed) * z * z / n) / (1 + z * z / n))


def deciles(verified: Verified) -> list[Decile]:
    """Returns the deciles that have observations, lowest first."""
    places = np.minimum((verified.predicted * 10).astype(np.int64), 9)
    counts = np.bincount(places, minlength=10)
    predicted = np.bincount(places, weights=verified.predicted, minlength=10)
    accepted = np.bincount(places, weights=verified.accepted, minlength=10)
    return [
        Decile(i / 10, (i + 1) / 10, int(n), float(predicted[i] / n), float(accepted[i] / n))
        for i, n in enumerate(counts)
        if n
    ]
