"""The price of a step by what the step does, fitted while the engine runs.

A decoding step of B sequences takes

    T * (1 + ask * a + verify * v + token * d / B + first_pass * r + model_token * k)

    a: 1 where the step asks for drafts, v: 1 where it verifies any, d: drafted tokens that it verifies, r: 1 where the
    model's drafter runs in it, k: tokens that this drafter makes for each sequence

T is the time of a plain step of the batch; it follows the batch, the lengths of contexts and the clock of the machine.
The other five are what is wanted, in units of T. All six drift, so they are the state of a Kalman filter: each step is
one measurement, which moves what is uncertain and leaves what it says nothing about. A step that took far longer than
expected counts as one of three standard deviations: pauses move the fit little, and no step has to be left out.

Written with lists, which between two steps of an engine cost it half of what arrays of six numbers do.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from histospec.protocol.costs import DEFAULT_VERIFY_COST

# The order of the state: the logarithm of T, then the prices.
ASK, VERIFY, TOKEN, FIRST_PASS, MODEL_TOKEN = PRICES = range(1, 6)
STATE = range(6)
START = (0.0, 0.05, 0.05, DEFAULT_VERIFY_COST, 0.5, 0.1)
SPREAD = (1.0, 0.3, 0.3, 0.5, 0.5, 0.25)  # standard deviations of START
DRIFT = (0.01, 0.001, 0.001, 0.003, 0.001, 0.001)  # and of what a step adds to them
LONGEST_DRIFT = 1000  # steps

BATCH_DRIFT = 0.7  # of T, where the batch changes by a factor of e
OTHER_SIZE = (0.0, 0.05, 0.05, 0.05, 0.1, 0.05)  # by which prices differ from those of a batch sqrt(2) as large
OTHER_SHARE = 0.2  # and by this share of themselves
FARTHEST = 4.0  # sizes away, beyond which they differ no more

FIRST_NOISE = 1.5  # standard deviation of a step's time, relative
LEAST_NOISE = 0.01
NOISE_MEMORY = 4, 32  # steps: at first, and later
TAIL = 3.0  # standard deviations, beyond which a step says no more
LEAST_PRICE = 0.1

KNOWN = 0.1  # standard deviation of a price that is known, or this share of it:
KNOWN_SHARE = 0.3
SURE = 0.01  # the same for drafts that no longer vary for the sake of learning


Looks = tuple[float, ...]
"""What a step does, six numbers: 1, then the factors of the five prices."""


def looks_of(asked: bool, drafted: float, model_tokens: int | None) -> Looks:
    """What a step does.

    Args:
        asked: whether drafts were asked for in it.
        drafted: tokens that it verified, for each sequence.
        model_tokens: that the model's drafter made for each sequence; None: it did not run.
    """
    return 1.0, float(asked), float(drafted > 0), drafted, float(model_tokens is not None), float(model_tokens or 0)


class DrafterCost(NamedTuple):
    """What the model's own drafter costs, in the same units as the cost of a drafted token."""

    first_pass: float
    """Of its first pass."""
    token: float
    """Of each token that it makes for every sequence."""


class StepPrices:
    """The prices at one size of the batch."""

    def __init__(self, other: "StepPrices | None" = None, distance: float = 0.0, token: float | None = None) -> None:
        """Starts from those of another size, `distance` half octaves away; None: from START.

        `token`: the price of a drafted token, where it is given; None: it is learned.
        """
        self._spread = [[spread**2 if i == j else 0.0 for j in STATE] for i, spread in enumerate(SPREAD)]
        self._drift = [drift**2 for drift in DRIFT]  # variances, as the spread
        self._state, self.noise = list(START), FIRST_NOISE
        if other is not None:
            self._state, self.noise = other._state.copy(), other.noise
            for i in PRICES:
                self._spread[i][1:] = other._spread[i][1:]
                away = (OTHER_SIZE[i] + OTHER_SHARE * other._state[i]) ** 2 * min(distance, FARTHEST)
                known = self._spread[i][i]
                self._spread[i][i] = max(known, min(known + away, max(SPREAD[i] ** 2, away)))
        if token is not None:
            self._state[TOKEN], self._drift[TOKEN] = token, 0.0
            for i in STATE:
                self._spread[i][TOKEN] = self._spread[TOKEN][i] = 0.0
        self._number = -1  # of the newest step; negative: T is not known yet
        self._steps = 0
        self._sequences = 1

    def observe(self, number: int, seconds: float, sequences: int, looks: Looks) -> None:
        """Learns from a decoding step.

        Args:
            number: of the step; they may have gaps.
            seconds: above 0, finite.
            sequences: of the batch, at least 1.
            looks: what the step did.
        """
        price = self.price(looks)
        if self._number < 0:
            self._state[0] = math.log(seconds / price)
        else:
            passed = min(number - self._number, LONGEST_DRIFT)
            for i in STATE:
                self._spread[i][i] += passed * self._drift[i]
            if sequences != self._sequences:
                self._spread[0][0] += (BATCH_DRIFT * math.log(sequences / self._sequences)) ** 2
        self._number, self._sequences = number, sequences
        slopes = price, *looks[1:]
        covariance = [_dot(row, slopes) for row in self._spread]
        variance = _dot(covariance, slopes) + (self.noise * price) ** 2
        deviation = math.sqrt(variance)
        error = seconds * math.exp(-self._state[0]) - price
        error = min(max(error, -TAIL * deviation), TAIL * deviation)
        self._state = [value + c * error / variance for value, c in zip(self._state, covariance, strict=True)]
        self._spread = [
            [value - c * other / variance for value, other in zip(row, covariance, strict=True)]
            for row, c in zip(self._spread, covariance, strict=True)
        ]
        for i in PRICES:  # none is negative: condition on 0 what came out below
            if (below := self._state[i]) < 0:
                share = below / self._spread[i][i]
                self._state = [value - share * s for value, s in zip(self._state, self._spread[i], strict=True)]
                self._state[i] = 0.0
        # The mean absolute deviation of normal noise is 0.8 standard deviations.
        self._steps += 1
        first, later = NOISE_MEMORY
        self.noise += (1.25 * abs(error) / deviation - 1) * self.noise / min(first + self._steps, later)
        self.noise = max(self.noise, LEAST_NOISE)

    def price(self, looks: Looks) -> float:
        """Of a step, in plain steps."""
        return max(LEAST_PRICE, 1 + _dot(looks[1:], self._state[1:]))

    def doubt(self, looks: Looks, others: Looks) -> float:
        """The standard deviation of the difference between the prices of two steps, in plain steps."""
        apart = [a - b for a, b in zip(looks, others, strict=True)]
        return math.sqrt(max(0.0, _dot([_dot(row, apart) for row in self._spread], apart)))

    @property
    def verify_cost(self) -> float:
        """Of a drafted token, in units of a step that asks for drafts and verifies some.

        A draft is worth its tokens over 1 + ask + verify + token * d / B; the length that makes most of this is the one
        for 1 + token / (1 + ask + verify) * d / B.
        """
        return self._state[TOKEN] / self._drafting()

    @property
    def verify_cost_sure(self) -> bool:
        """Whether it was measured so well that drafts need not vary for its sake."""
        return math.sqrt(self._spread[TOKEN][TOKEN]) <= max(SURE, KNOWN_SHARE * self._state[TOKEN])

    @property
    def verify_cost_known(self) -> bool:
        """Whether it was measured."""
        return self._known(TOKEN)

    def drafter(self, asks: bool) -> DrafterCost | None:
        """None while it is not known. `asks`: whether in units of a step that asks for drafts, or of a plain one."""
        if not (self._known(FIRST_PASS) and self._known(MODEL_TOKEN)):
            return None
        unit = self._drafting() if asks else 1.0
        return DrafterCost(self._state[FIRST_PASS] / unit, self._state[MODEL_TOKEN] / unit)

    def _drafting(self) -> float:
        return 1 + self._state[ASK] + self._state[VERIFY]

    def _known(self, which: int) -> bool:
        return math.sqrt(self._spread[which][which]) <= max(KNOWN, KNOWN_SHARE * self._state[which])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total
