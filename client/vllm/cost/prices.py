"""The price of a step by what the step does, fitted while the engine runs.

A decoding step of B sequences takes

    T * (1 + ask * a + token * d / B + first_pass * r + model_token * k)

    a: 1 where the step asks for drafts, d: drafted tokens that it verifies, r: 1 where the model's drafter runs in it,
    k: tokens that this drafter makes for each sequence

T is the time of a plain step of the batch; it follows the batch, the lengths of contexts and the clock of the machine.
The other four are what is wanted, in units of T. All five drift, so they are the state of a Kalman filter: each step is
one measurement, which moves what is uncertain and leaves what it says nothing about. A step that took far longer than
expected counts as one of three standard deviations: pauses move the fit little, and no step has to be left out.
"""

import math
from typing import NamedTuple

import numpy as np

from histospec.protocol.costs import DEFAULT_VERIFY_COST

# The order of the state: the logarithm of T, then the prices.
ASK, TOKEN, FIRST_PASS, MODEL_TOKEN = 1, 2, 3, 4
START = np.array([0.0, 0.05, DEFAULT_VERIFY_COST, 0.5, 0.1])
SPREAD = np.array([1.0, 0.1, 0.5, 0.5, 0.25])  # standard deviations of START
DRIFT = np.array([0.01, 0.001, 0.003, 0.003, 0.002])  # and of what a step adds to them
LONGEST_DRIFT = 1000  # steps

BATCH_DRIFT = 0.7  # of T, where the batch changes by a factor of e
OTHER_SIZE = np.array([0.0, 0.05, 0.15, 0.2, 0.1])  # by which prices differ from those of a batch sqrt(2) as large
FARTHEST = 4.0  # sizes away, beyond which they differ no more

FIRST_NOISE = 0.3  # standard deviation of a step's time, relative
LEAST_NOISE = 0.01
NOISE_MEMORY = 32.0  # steps
TAIL = 3.0  # standard deviations, beyond which a step says no more
LEAST_PRICE = 0.1

KNOWN = 0.1  # standard deviation of a price that is known, or this share of it:
KNOWN_SHARE = 0.3


class DrafterCost(NamedTuple):
    """What the model's own drafter costs, in units of a plain step of the batch."""

    first_pass: float
    """Of its first pass."""
    token: float
    """Of each token that it makes for every sequence."""


class StepPrices:
    """The prices at one size of the batch."""

    def __init__(self, other: "StepPrices | None" = None, distance: float = 0.0) -> None:
        """Starts from those of another size, `distance` half octaves away; None: from START."""
        self._spread = np.diag(SPREAD**2)
        if other is None:
            self._state, self.noise = START.copy(), FIRST_NOISE
        else:
            self._state, self.noise = other._state.copy(), other.noise
            self._spread[1:, 1:] = other._spread[1:, 1:]
            away = OTHER_SIZE[1:] ** 2 * min(distance, FARTHEST)
            diagonal = np.minimum(np.diag(self._spread)[1:] + away, np.maximum(SPREAD[1:] ** 2, away))
            np.fill_diagonal(self._spread[1:, 1:], np.maximum(np.diag(self._spread)[1:], diagonal))
        self._number = -1  # of the newest step; negative: T is not known yet
        self._sequences = 1

    def observe(
        self, number: int, seconds: float, sequences: int, asked: bool, drafted: int, model_tokens: int | None
    ) -> None:
        """Learns from a decoding step.

        Args:
            number: of the step; they may have gaps.
            seconds: above 0, finite.
            sequences: of the batch, at least 1.
            asked: whether drafts were asked for in it.
            drafted: tokens that it verified.
            model_tokens: that the model's drafter made for each sequence; None: it did not run.
        """
        looks = self._looks(asked, drafted / sequences, model_tokens)
        price = self._price(looks)
        if self._number < 0:
            self._state[0] = math.log(seconds / price)
        else:
            passed = min(number - self._number, LONGEST_DRIFT)
            spread = DRIFT**2 * passed
            spread[0] += (BATCH_DRIFT * math.log(sequences / self._sequences)) ** 2
            self._spread.flat[:: len(spread) + 1] += spread
        self._number, self._sequences = number, sequences
        looks[0] = price
        covariance = self._spread @ looks
        noise = (self.noise * price) ** 2
        variance = float(looks @ covariance) + noise
        deviation = math.sqrt(variance)
        error = seconds * math.exp(-self._state[0]) - price
        error = min(max(error, -TAIL * deviation), TAIL * deviation)
        self._state += covariance * (error / variance)
        self._spread -= np.outer(covariance, covariance / variance)
        for price_of in range(ASK, len(START)):  # none is negative: condition on 0 what came out below
            if (below := float(self._state[price_of])) < 0:
                self._state -= self._spread[price_of] * (below / float(self._spread[price_of, price_of]))
                self._state[price_of] = 0.0
        # The mean absolute deviation of normal noise is 0.8 standard deviations.
        self.noise += (1.25 * abs(error) / deviation - 1) * self.noise / NOISE_MEMORY
        self.noise = max(self.noise, LEAST_NOISE)

    def price(self, asked: bool, drafted: float, model_tokens: int | None) -> float:
        """Of a step, in plain steps. `drafted`: tokens a sequence."""
        return self._price(self._looks(asked, drafted, model_tokens))

    def doubt(self, drafted: float) -> float:
        """The standard deviation of what asking costs with so many drafted tokens a sequence, in plain steps."""
        looks = self._looks(True, drafted, None)
        looks[0] = 0.0
        return math.sqrt(max(0.0, float(looks @ self._spread @ looks)))

    @property
    def verify_cost(self) -> float:
        """Of a drafted token, in units of a step that asks for drafts.

        A draft is worth its tokens over 1 + ask + token * d / B; the length that makes most of this is the one for
        1 + token / (1 + ask) * d / B.
        """
        return float(self._state[TOKEN] / (1 + self._state[ASK]))

    @property
    def verify_cost_known(self) -> bool:
        """Whether it was measured."""
        return self._known(TOKEN)

    @property
    def drafter(self) -> DrafterCost | None:
        """None while it is not known."""
        if not (self._known(FIRST_PASS) and self._known(MODEL_TOKEN)):
            return None
        return DrafterCost(float(self._state[FIRST_PASS]), float(self._state[MODEL_TOKEN]))

    def _known(self, which: int) -> bool:
        return math.sqrt(self._spread[which, which]) <= max(KNOWN, KNOWN_SHARE * float(self._state[which]))

    def _price(self, looks: np.ndarray) -> float:
        return max(LEAST_PRICE, float(1 + looks[1:] @ self._state[1:]))

    @staticmethod
    def _looks(asked: bool, drafted: float, model_tokens: int | None) -> np.ndarray:
        ran = model_tokens is not None
        return np.array([1.0, asked, drafted, ran, model_tokens or 0.0])
