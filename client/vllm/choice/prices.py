"""Fits the price of a step to the work in it, while the engine runs.

A decoding step of B sequences takes

    T * (1 + ask * a + verify * v + token * d / B + first_pass * r + model_token * k)

    a: 1 if the step asks for drafts, v: 1 if it verifies any, d: drafted tokens that it verifies, r: 1 if the model's
    drafter runs in it, k: tokens that this drafter makes for each sequence

T is the time of a step without drafts at this batch size. It depends on the batch, the lengths of contexts and the
clock rate of the machine. The other five are the wanted prices, in units of T. All six drift, so they are the state of
a Kalman filter: each step is one measurement, which moves the uncertain values and keeps those that it says nothing
about. A step that took far longer than expected counts as one that is three standard deviations longer. So pauses move
the fit little, and no step has to be left out.

The code uses lists: between two steps of an engine, they take half the time of arrays of six numbers.
"""

import math
from collections.abc import Sequence
from operator import mul

from histospec.protocol.costs import DEFAULT_VERIFY_COST

# The order of the state: the logarithm of T, then the prices.
ASK, VERIFY, TOKEN, FIRST_PASS, MODEL_TOKEN = PRICES = range(1, 6)
STATE = range(6)
START = (0.0, 0.05, 0.05, DEFAULT_VERIFY_COST, 0.5, 0.1)
SPREAD = (1.0, 0.3, 0.3, 0.5, 0.5, 0.25)  # standard deviations of START
DRIFT = (0.01, 0.001, 0.001, 0.003, 0.001, 0.001)  # standard deviations of their change in one step
LONGEST_DRIFT = 1000  # steps

BATCH_DRIFT = 0.7  # drift of T if the batch changes by a factor of e
OTHER_SIZE = (0.0, 0.05, 0.05, 0.05, 0.1, 0.05)  # difference of prices to those of a batch sqrt(2) times as large,
OTHER_SHARE = 0.2  # plus this share of the prices
FARTHEST = 4.0  # sizes; beyond this distance the difference grows no more

LOOSER = 0.1  # standard deviation

FIRST_NOISE = 1.5  # standard deviation of a step's time, relative
LEAST_NOISE = 0.01
NOISE_MEMORY = 4, 32  # steps: at first, and later
TAIL = 3.0  # standard deviations to which errors are clipped
LEAST_PRICE = 0.1

LOWEST, HIGHEST = 0.01, 1.0  # cost to ask for drafts with

KNOWN = 0.1  # a price is known if its standard deviation is at most this, or this share of the price:
KNOWN_SHARE = 0.3
SURE = 0.01  # as KNOWN, for the price at which drafts no longer vary to learn it


Looks = tuple[float, ...]
"""The work of a step in six numbers: 1, then the factors of the five prices."""


def looks_of(asked: bool, drafted: float, model_tokens: int | None) -> Looks:
    """Returns the work of a step.

    Args:
        asked: whether the step asked for drafts.
        drafted: drafted tokens that it verified, per sequence.
        model_tokens: tokens that the model's drafter made for each sequence; None: it did not run.
    """
    return 1.0, float(asked), float(drafted > 0), drafted, float(model_tokens is not None), float(model_tokens or 0)


NOTHING = looks_of(False, 0.0, None)
"""The work of a step without drafts."""


def half_octaves(sequences: int) -> int:
    """Returns the size of a batch of at least one sequence, as its logarithm in half octaves."""
    return round(2 * math.log2(sequences))


class StepPrices:
    """The prices for one size of the batch."""

    def __init__(self, other: "StepPrices | None" = None, distance: float = 0.0, token: float | None = None) -> None:
        """Starts from the prices of another size, `distance` half octaves away; None: from START.

        `token`: the price of a drafted token, if it is given; None: learn it.
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
        self._plain: bool = other is not None and other._plain
        self._number = -1  # number of the newest step; negative: T is not known yet
        self._steps = 0
        self._sequences = 1

    def observe(self, number: int, seconds: float, sequences: int, looks: Looks) -> None:
        """Learns from a decoding step.

        Args:
            number: the step's number; numbers may have gaps.
            seconds: the time of the step, above 0 and finite.
            sequences: the size of the batch, at least 1.
            looks: the work of the step.
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
        self._plain = self._plain or not any(looks[1:])
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
        for i in PRICES:  # no price is negative: condition a negative one on 0
            if (below := self._state[i]) < 0:
                share = below / self._spread[i][i]
                self._state = [value - share * s for value, s in zip(self._state, self._spread[i], strict=True)]
                self._state[i] = 0.0
        # The mean absolute deviation of normal noise is 0.8 standard deviations.
        self._steps += 1
        first, later = NOISE_MEMORY
        self.noise += (1.25 * abs(error) / deviation - 1) * self.noise / min(first + self._steps, later)
        self.noise = max(self.noise, LEAST_NOISE)

    def loosen(self) -> None:
        """Forgets part of what steps with drafts cost: the first ones after a pause are slower than those that follow.

        Without this, the filter would explain the difference by the price of a drafted token.
        """
        for i in (ASK, VERIFY):
            self._spread[i][i] += LOOSER**2

    def price(self, looks: Looks) -> float:
        """Returns the price of a step, in units of a step without drafts."""
        return max(LEAST_PRICE, 1 + _dot(looks[1:], self._state[1:]))

    def doubt(self, looks: Looks, others: Looks) -> float:
        """Returns the standard deviation of the difference between the prices of two steps, in the same units."""
        apart = [a - b for a, b in zip(looks, others, strict=True)]
        return math.sqrt(max(0.0, _dot([_dot(row, apart) for row in self._spread], apart)))

    @property
    def verify_cost(self) -> float:
        """The price of a drafted token, in units of a step that asks for drafts and verifies some.

        The best draft length maximizes its tokens divided by 1 + ask + verify + token * d / B. The same length
        maximizes its tokens divided by 1 + token / (1 + ask + verify) * d / B.
        """
        return self._state[TOKEN] / self._drafting()

    @property
    def cost(self) -> float:
        """The `verify_cost` to ask for drafts with; DEFAULT_VERIFY_COST until it was measured."""
        return min(max(self.verify_cost, LOWEST), HIGHEST) if self.verify_cost_known else DEFAULT_VERIFY_COST

    @property
    def verify_cost_sure(self) -> bool:
        """Whether it is known so well that drafts need not vary to learn it."""
        return math.sqrt(self._spread[TOKEN][TOKEN]) <= max(SURE, KNOWN_SHARE * self._state[TOKEN])

    @property
    def verify_cost_known(self) -> bool:
        """Whether it was measured."""
        return self._known(TOKEN)

    @property
    def steps(self) -> int:
        """How many steps were observed."""
        return self._steps

    @property
    def plain_known(self) -> bool:
        """Whether a step without drafts was measured, whose time is the unit of the prices."""
        return self._plain

    @property
    def ask(self) -> float:
        """The price of asking for drafts."""
        return self._state[ASK]

    @property
    def verify(self) -> float:
        """The price of verifying any drafts."""
        return self._state[VERIFY]

    @property
    def token(self) -> float:
        """The price of verifying a drafted token for every sequence."""
        return self._state[TOKEN]

    @property
    def first_pass(self) -> float:
        """The price of the first pass of the model's drafter."""
        return self._state[FIRST_PASS]

    @property
    def model_token(self) -> float:
        """The price of a token that this drafter makes for every sequence."""
        return self._state[MODEL_TOKEN]

    @property
    def drafter_known(self) -> bool:
        """Whether the last two were measured."""
        return self._known(FIRST_PASS) and self._known(MODEL_TOKEN)

    def _drafting(self) -> float:
        return 1 + self._state[ASK] + self._state[VERIFY]

    def _known(self, which: int) -> bool:
        return math.sqrt(self._spread[which][which]) <= max(KNOWN, KNOWN_SHARE * self._state[which])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total
