"""Measures the time of steps, and fits the price of a step to the work in it, while the engine runs.

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
import time
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from histospec.protocol.costs import DEFAULT_VERIFY_COST


class StepClock:
    """Measures from the end of one step to the end of the next.

    If the model computes in this process, on its CPU, the clock is CPU time, so that other programs on the machine do
    not count as a cost of drafts. Otherwise it is wall-clock time.

    On a CPU, the first step with a number of tokens takes 1.5 to 3 times as long as later ones: oneDNN compiles
    kernels for this number.
    """

    def __init__(self, computes_here: bool) -> None:
        """`computes_here`: whether the model's forward passes run in this process, on the CPU."""
        self._now: Callable[[], float] = time.process_time if computes_here else time.perf_counter
        self._last = math.inf
        self._compiled: set[int] | None = set() if computes_here else None

    def compiles(self, tokens: int) -> bool:
        """Returns whether a step compiles kernels, because it is the first with this number of tokens."""
        if self._compiled is None or tokens in self._compiled:
            return False
        self._compiled.add(tokens)
        return True

    def lap(self) -> float:
        """Returns the seconds since the last lap; -inf if there was none since the engine was idle."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds

    def idle(self) -> None:
        """Notes that the engine is idle, so that the next lap has no start."""
        self._last = math.inf


class StepWork(NamedTuple):
    """The work of a step: the factors of T and of the five prices. Also the prices themselves, in this order."""

    plain: float = 1.0
    ask: float = 0.0
    verify: float = 0.0
    token: float = 0.0
    first_pass: float = 0.0
    model_token: float = 0.0


def work_of(asked: bool, drafted: float, model_tokens: int | None) -> StepWork:
    """Returns the work of a step.

    Args:
        asked: whether the step asked for drafts.
        drafted: drafted tokens that it verified, per sequence.
        model_tokens: tokens that the model's drafter made for each sequence; None: it did not run.
    """
    runs = model_tokens is not None
    return StepWork(1.0, float(asked), float(drafted > 0), drafted, float(runs), float(model_tokens or 0))


TOKEN, FIRST_PASS, MODEL_TOKEN = 3, 4, 5
STATE = range(6)  # the logarithm of T, then the prices
PRICES = STATE[1:]
START = StepWork(0.0, 0.05, 0.05, DEFAULT_VERIFY_COST, 0.5, 0.1)
SPREAD = StepWork(1.0, 0.3, 0.3, 0.5, 0.5, 0.25)  # standard deviations of START
DRIFT = StepWork(0.01, 0.001, 0.001, 0.003, 0.001, 0.001)  # standard deviations of their change in one step
BATCH_DRIFT = 0.7  # drift of T if the batch changes by a factor of e
OTHER_SIZE = (0.0, 0.05, 0.05, 0.05, 0.1, 0.05)  # difference of prices to those of a batch sqrt(2) times as large,
OTHER_SHARE = 0.2  # plus this share of the prices

FIRST_NOISE, LEAST_NOISE = 1.5, 0.01
"""Standard deviation of a step's time, relative: at first, and at least. With 0.3, a first step that another program
slowed down is trusted for thousands of steps."""
NOISE_MEMORY = 4, 32  # steps: at first, and later
TAIL = 3.0  # standard deviations to which errors are clipped

LOWEST, HIGHEST = 0.01, 1.0  # cost to ask for drafts with

KNOWN_SHARE = 0.3  # a price is known if its standard deviation is at most this share of it,
KNOWN, SURE = 0.1, 0.01  # or this; SURE: for the price at which drafts no longer vary to learn it


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
                away = (OTHER_SIZE[i] + OTHER_SHARE * other._state[i]) ** 2 * distance
                known = self._spread[i][i]
                self._spread[i][i] = max(known, min(known + away, max(SPREAD[i] ** 2, away)))
        if token is not None:
            self._state[TOKEN], self._drift[TOKEN] = token, 0.0
            for i in STATE:
                self._spread[i][TOKEN] = self._spread[TOKEN][i] = 0.0
        self.plain_known: bool = other is not None and other.plain_known
        """Whether a step without drafts was measured, whose time is the unit of the prices."""
        self.steps = 0
        """How many steps were observed."""
        self._number = -1  # number of the newest step; negative: T is not known yet
        self._sequences = 1
        self._all_plain = True  # whether no step drafted so far

    def observe(self, number: int, seconds: float, sequences: int, work: StepWork) -> None:
        """Learns from a decoding step.

        Args:
            number: the step's number; numbers may have gaps.
            seconds: the time of the step, above 0 and finite.
            sequences: the size of the batch, at least 1.
            work: the work of the step.
        """
        price = self.price(work)
        first, later = NOISE_MEMORY
        plain, unit = not any(work[1:]), math.log(seconds / price)
        if self._number < 0:
            self._state[0] = unit
        else:
            if self._all_plain and plain and self.steps < first:  # the fastest of them: a pause makes a step longer
                self._state[0] = min(unit, self._state[0])
            passed = number - self._number
            for i in STATE:
                self._spread[i][i] += passed * self._drift[i]
            if sequences != self._sequences:
                self._spread[0][0] += (BATCH_DRIFT * math.log(sequences / self._sequences)) ** 2
        self._number, self._sequences = number, sequences
        self.plain_known, self._all_plain = self.plain_known or plain, self._all_plain and plain
        slopes = price, *work[1:]
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
        self.steps += 1
        self.noise += (1.25 * abs(error) / deviation - 1) * self.noise / min(first + self.steps, later)
        self.noise = max(self.noise, LEAST_NOISE)

    def price(self, work: StepWork) -> float:
        """Returns the price of a step, in units of a step without drafts."""
        return 1 + _dot(work[1:], self._state[1:])

    def doubt(self, work: StepWork, other: StepWork) -> float:
        """Returns the standard deviation of the difference between the prices of two steps, in the same units."""
        apart = [a - b for a, b in zip(work, other, strict=True)]
        return math.sqrt(max(0.0, _dot([_dot(row, apart) for row in self._spread], apart)))

    @property
    def each(self) -> StepWork:
        """The price of each kind of work: asking, verifying anything, a drafted token for every sequence, ..."""
        return StepWork(1.0, *self._state[1:])

    @property
    def verify_cost(self) -> float:
        """The price of a drafted token, in units of a step that asks for drafts and verifies some.

        The best draft length maximizes its tokens divided by 1 + ask + verify + token * d / B. The same length
        maximizes its tokens divided by 1 + token / (1 + ask + verify) * d / B.
        """
        each = self.each
        return each.token / (1 + each.ask + each.verify)

    @property
    def cost(self) -> float:
        """The `verify_cost` to ask for drafts with; DEFAULT_VERIFY_COST until it was measured."""
        return min(max(self.verify_cost, LOWEST), HIGHEST) if self.verify_cost_known else DEFAULT_VERIFY_COST

    @property
    def verify_cost_sure(self) -> bool:
        """Whether it is known so well that drafts need not vary to learn it."""
        return self._known(TOKEN, SURE)

    @property
    def verify_cost_known(self) -> bool:
        """Whether it was measured."""
        return self._known(TOKEN)

    @property
    def drafter_known(self) -> bool:
        """Whether the prices of the model's drafter were measured."""
        return self._known(FIRST_PASS) and self._known(MODEL_TOKEN)

    def _known(self, which: int, least: float = KNOWN) -> bool:
        return math.sqrt(self._spread[which][which]) <= max(least, KNOWN_SHARE * self._state[which])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total
