"""What verifying one drafted token costs, learned from the time that the engine's steps take. Does no I/O.

A step that decodes B sequences and verifies d drafted tokens takes about T + s * d seconds. It would have given B
tokens without drafts, so an accepted token saves T / B seconds while a drafted one costs s:

    verify_cost = s * B / T        about 0 where the GPU waits for its memory, about 1 where it is saturated

T and s depend on the batch, the lengths of the contexts and the machine, and step times have heavy tails. Others fit
a line or a table to steps timed before serving; rollouts drain from hundreds of sequences to one and start again, so
here two steps of the same batch that differ in d are compared while they happen, one just after the other: what they
share (contexts, clock, neighbours) cancels. Every such contrast is one opinion on the cost, free of units; the
answer is the weighted median of the newest ones at about this batch. A pause falls into the tails of the median.

Where drafts do not vary by themselves, a step now and then is taken without drafts, or, where drafts have vanished,
with the drafts of a moderate cost: the only way to see that they would pay again. Steps without drafts do not ask for
any either, so the cost includes what asking takes.
"""

import math
import statistics
from collections import deque
from typing import NamedTuple

from histospec.protocol.costs import DEFAULT_VERIFY_COST, HOPELESS_VERIFY_COST

LOWEST, HIGHEST = 0.01, 1.0
MODERATE = 0.25  # the cost that draws drafts out where they have vanished: the likely ones, which pay for themselves

NEWEST = 128  # contrasts kept for each size of the batch, at most; older ones are forgotten
SURE = 128.0  # sum of their squared weights, with which fewer are enough: noise falls with its root
REACH = 10  # sizes nearby count too, half as much with every factor of sqrt(2), where this one has seen little
ENOUGH = 6  # contrasts, of whichever size, to answer from
SETTLED = 12.0  # of this size, others in part, to stop being curious
PLAIN = 9  # steps without drafts whose median is the time of one
PLENTY = 16.0  # not to ask sizes further away
EAGER, PATIENT = 8, 256  # steps without a contrast until one is made; one in 256 costs less than 0.4 %
CLOSE = 16  # steps that may lie between the two of a contrast
CONTRAST = 0.25  # drafted tokens a sequence by which they differ, at least, and by half of what is usual


class _Step(NamedTuple):
    number: int
    seconds: float
    sequences: int
    drafted: int


class _Contrast(NamedTuple):
    cost: float
    weight: float  # drafted tokens a sequence; the noise of the cost is inverse to it


class _Size:
    """What was seen at one size of the batch: the newest contrasts, as many as it takes, and plain steps."""

    def __init__(self) -> None:
        self.kept: deque[_Contrast] = deque()
        self.plain: deque[float] = deque(maxlen=PLAIN)  # seconds
        self._squares = 0.0

    def add(self, contrast: _Contrast) -> None:
        self.kept.append(contrast)
        self._squares += contrast.weight**2
        while len(self.kept) > NEWEST or (len(self.kept) > SETTLED and self._squares > SURE + self.kept[0].weight ** 2):
            self._squares -= self.kept.popleft().weight ** 2


class LearnedCost:
    """Told what each step took, answers with which `verify_cost` to ask for the next drafts."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the batch, in half octaves
        self._last: _Step | None = None  # the newest step that can be compared
        self._number = 0
        self._quiet = 0  # steps since the last contrast or the last try to make one
        self._drafted = 0.0  # tokens a sequence, lately
        self._size = 0
        self._known = 0.0  # contrasts behind the cost, those of other sizes in part
        self._cost: float | None = None

    @property
    def value(self) -> float:
        """The cost at the batch of the newest step; DEFAULT_VERIFY_COST while too little is known."""
        return DEFAULT_VERIFY_COST if self._cost is None else self._cost

    @property
    def learned(self) -> bool:
        """Whether `value` was measured."""
        return self._cost is not None

    def observe(self, seconds: float, sequences: int, tokens: int, prefill: bool = False) -> None:
        """Takes note of one step.

        Args:
            seconds: from the end of the step before to its own; infinite or nan when that is not known (idle time).
            sequences: how many it computed.
            tokens: how many it was scheduled, drafted ones included.
            prefill: whether it computed prompts, too. It can be compared with no other step.
        """
        self._number += 1
        self._quiet += 1
        if sequences < 1:
            return
        changed = self._moved(sequences)
        if not prefill:
            step = _Step(self._number, seconds, sequences, tokens - sequences)
            self._drafted += 0.1 * (step.drafted / sequences - self._drafted)
            if 0 < seconds < math.inf:
                changed |= self._compare(step)
                self._last = step
        if changed:
            self._settle()

    def next(self) -> float | None:
        """The cost to ask for the next drafts with; None: do not ask, and take this step without."""
        if self._quiet < (EAGER if self._known < SETTLED else PATIENT):
            return self.value if self.value < HOPELESS_VERIFY_COST else None
        self._quiet = 0
        return None if self._drafted >= CONTRAST else min(self.value, MODERATE)

    def _moved(self, sequences: int) -> bool:
        size = round(2 * math.log2(sequences))
        moved, self._size = size != self._size, size
        return moved

    def _compare(self, step: _Step) -> bool:
        """Keeps what this step and the last one say together; whether they said anything."""
        size, last = self._sizes.setdefault(self._size, _Size()), self._last
        if step.drafted < CONTRAST * step.sequences:
            size.plain.append(step.seconds)
        if last is None or step.number - last.number > CLOSE:
            return False
        if abs(step.sequences - last.sequences) > max(1, step.sequences // 64):
            return False
        less, more = sorted((last, step), key=lambda s: s.drafted)
        apart = (more.drafted - less.drafted) / step.sequences
        if apart < max(CONTRAST, self._drafted / 2):
            return False
        each = (more.seconds - less.seconds) / apart  # for one more drafted token in every sequence
        plain = less.seconds - each * less.drafted / step.sequences
        if less.drafted > CONTRAST * step.sequences:
            # A line through two steps with drafts passes below the plain one: memory bounds the curve from there.
            if size.plain:
                plain = max(plain, min(statistics.median(size.plain), less.seconds))
            elif 4 * less.drafted > more.drafted:
                return False
        size.add(_Contrast(each / plain if plain > 0 else math.inf, apart))
        self._quiet = 0
        return True

    def _settle(self) -> None:
        """The weighted median of the contrasts of the present size, then of its neighbours, until there are plenty."""
        opinions: list[tuple[float, float]] = []
        self._known = 0.0
        for distance in range(REACH + 1):
            nearness = 0.5**distance
            for size in {self._size - distance, self._size + distance}:
                if size in self._sizes:
                    contrasts = self._sizes[size].kept
                    self._known += nearness * len(contrasts)
                    opinions.extend((contrast.cost, contrast.weight * nearness) for contrast in contrasts)
            if self._known >= PLENTY:
                break
        self._cost = min(max(_weighted_median(opinions), LOWEST), HIGHEST) if len(opinions) >= ENOUGH else None


class FixedCost:
    """The same, where somebody knows better."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.learned = False

    def observe(self, seconds: float, sequences: int, tokens: int, prefill: bool = False) -> None:
        """Learns nothing."""

    def next(self) -> float | None:
        """The value, as long as anything can be drafted at it."""
        return self.value if self.value < HOPELESS_VERIFY_COST else None


def _weighted_median(opinions: list[tuple[float, float]]) -> float:
    """The smallest value that half of the weight does not exceed. `opinions`: (value, weight), not empty."""
    half = sum(weight for _, weight in opinions) / 2
    for value, weight in sorted(opinions):
        half -= weight
        if half <= 0:
            return value
    return max(opinions)[0]
