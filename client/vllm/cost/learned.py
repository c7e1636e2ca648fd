"""With which `verify_cost` to ask for the next drafts, and whether to ask at all.

What counts is the time of a token with drafts against its time without. So steps of both kinds are taken: while drafts
pay, one without now and then; while they do not, a few with drafts now and then, further and further apart.
"""

import math

from histospec.protocol.costs import DEFAULT_VERIFY_COST, HOPELESS_VERIFY_COST

from .prices import DrafterCost, StepPrices
from .rates import Rate

LOWEST, HIGHEST = 0.01, 1.0
MODERATE = 0.25  # the cost to look with where drafts are dearer: the likely ones, which nearly pay for themselves

EAGER, PATIENT = 6, 256  # steps from one without drafts to the next, while in doubt and later
SETTLED = 0.05  # doubt about the price of a step that is small enough, as a share of the price
LOOK = 64  # sequences times steps that a look at drafts takes,
LOOK_STEPS = 3, 8  # in at least and at most so many steps
GAIN = 1.02  # drafts must be so much faster to be taken up again
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 256  # steps between two looks


class _Size:
    """What is known at one size of the batch."""

    def __init__(self, other: "_Size | None" = None, distance: float = 0.0) -> None:
        self.prices = StepPrices(None if other is None else other.prices, distance)
        self.drafting, self.plain = Rate(), Rate()
        self.asks = True
        self.pause = SHORTEST_PAUSE
        self.until = 0  # while quiet: the step of the next look
        self.silent = 0  # the newest step without drafts

    def faster(self) -> float:
        """Times as fast with drafts as without."""
        return self.drafting.speed / self.plain.speed


class _Steps:
    """The prices at every size of the batch, learned from every step."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the batch, in half octaves
        self._here = _Size()
        self._number = 0
        self._asked = False  # in the step under way

    @property
    def drafter(self) -> DrafterCost | None:
        """What the model's own drafter costs at the batch of the newest step; None while that is not known."""
        return self._here.prices.drafter

    def observe(
        self,
        seconds: float,
        sequences: int,
        tokens: int,
        prefill: bool = False,
        model_tokens: int | None = None,
        generated: int | None = None,
    ) -> None:
        """Takes note of one step.

        Args:
            seconds: from the end of the step before to its own; infinite or nan when that is not known (idle time).
            sequences: how many it computed.
            tokens: how many it was scheduled, drafted ones included.
            prefill: whether it computed prompts, too. It can be compared with no other step.
            model_tokens: how many tokens the model's own drafter made for each sequence; None: it did not run.
            generated: how many tokens came out of the step; None: not known, and nothing is learned of what drafts
                yield.
        """
        self._number += 1
        if sequences < 1:
            return
        self._move(round(2 * math.log2(sequences)))
        if prefill or not 0 < seconds < math.inf:
            return
        here, drafted = self._here, tokens - sequences
        here.prices.observe(self._number, seconds, sequences, self._asked, drafted, model_tokens)
        if generated is not None:
            rate = here.drafting if self._asked else here.plain
            price = here.prices.price(self._asked, drafted / sequences, model_tokens)
            rate.add(sequences, generated, drafted, price)
            self._judge(sequences)

    def _move(self, size: int) -> None:
        if size not in self._sizes:
            nearest = min(self._sizes, key=lambda other: abs(other - size), default=None)
            self._sizes[size] = _Size() if nearest is None else _Size(self._sizes[nearest], abs(nearest - size))
            self._sizes[size].silent = self._number
        self._here = self._sizes[size]

    def _judge(self, sequences: int) -> None:
        """A step was added to the rates."""


class LearnedCost(_Steps):
    """Told what each step took and gave, answers with which `verify_cost` to ask for the next drafts."""

    @property
    def value(self) -> float:
        """The cost at the batch of the newest step; DEFAULT_VERIFY_COST while too little is known."""
        prices = self._here.prices
        return min(max(prices.verify_cost, LOWEST), HIGHEST) if prices.verify_cost_known else DEFAULT_VERIFY_COST

    @property
    def learned(self) -> bool:
        """Whether `value` was measured."""
        return self._here.prices.verify_cost_known

    def next(self) -> float | None:
        """The cost to ask for the next drafts with; None: do not ask, and take this step without."""
        here = self._here
        if here.asks:
            self._asked = self._number - here.silent < (EAGER if self._doubtful() else PATIENT)
        else:
            self._asked = self._number >= here.until
        if self._asked:
            return self.value if here.asks else min(self.value, MODERATE)
        here.silent = self._number
        return None

    def _doubtful(self) -> bool:
        """Whether a step without drafts would say much: about the price of drafts, or whether they pay."""
        here = self._here
        price = here.prices.price(True, here.drafting.drafted, None)
        doubt = here.prices.doubt(here.drafting.drafted) / price
        return not self.learned or (doubt > SETTLED and abs(math.log(max(here.faster(), 1e-3))) < 2 * doubt)

    def _judge(self, sequences: int) -> None:
        if not self._asked:
            return
        here = self._here
        least, most = LOOK_STEPS
        if here.drafting.steps < min(max(least, LOOK / sequences), most) or not self.learned:
            return
        if here.faster() >= (1 if here.asks else GAIN):
            here.asks, here.pause = True, SHORTEST_PAUSE
            return
        here.pause = SHORTEST_PAUSE if here.asks else min(2 * here.pause, LONGEST_PAUSE)
        here.asks, here.until = False, self._number + here.pause
        here.drafting.clear()


class FixedCost(_Steps):
    """The same, where somebody knows better what a drafted token costs; learns what the model's own drafter does."""

    learned = False

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def next(self) -> float | None:
        """The value, as long as anything can be drafted at it."""
        self._asked = self.value < HOPELESS_VERIFY_COST
        return self.value if self._asked else None
