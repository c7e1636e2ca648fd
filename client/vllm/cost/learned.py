"""With which `verify_cost` to ask for the next drafts, and whether to ask at all.

What counts is the time of a token with drafts against its time without. So steps of both kinds are taken: while drafts
pay, one without now and then; while they do not, a few with drafts now and then, further and further apart.
"""

import math

from histospec.protocol.costs import DEFAULT_VERIFY_COST, HOPELESS_VERIFY_COST

from .prices import DrafterCost, StepPrices, looks_of
from .rates import Rate

LOWEST, HIGHEST = 0.01, 1.0
MODERATE = 0.25  # the cost to look with where drafts are dearer: the likely ones, which nearly pay for themselves

EAGER, PATIENT = 6, 256  # steps from one without drafts to the next, while in doubt and later
SETTLED = 0.05  # doubt about the price of a step that is small enough, as a share of the price
VARIED, SHORTER = 4, 3.0  # every so many steps ask for shorter drafts while the cost is unsure: at so much more
PLAIN = 3  # steps without drafts before any: what they take is the unit of all prices
LOOK = 48  # sequences times steps that a look at drafts takes,
LOOK_STEPS = 2, 8  # in at least and at most so many steps
OPTIMISM = 1.0  # standard deviations by which a step with drafts may be cheaper than it seems: to try is to learn
GAIN = 1.02  # drafts must be so much faster to be taken up again
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 512  # steps between two looks; one follows a time without requests, too

OTHER_BATCH = 2  # half octaves, beyond which what was found to pay or not says little
LEAST_SHARE = 0.1  # of the price that is believed, which it is at best

NOTHING = looks_of(False, 0.0, None)
WATCHED = 8  # of steps in which nothing is asked, verified or drafted, the share that is learned from


class _Size:
    """What is known at one size of the batch."""

    def __init__(self, other: "_Size | None" = None, distance: float = 0.0, token: float | None = None) -> None:
        self.prices: StepPrices = StepPrices(None if other is None else other.prices, distance, token)
        self.drafting, self.plain = Rate(), Rate()
        self.asks: bool = other is None or other.asks
        self.pause = SHORTEST_PAUSE
        self.until = 0  # while quiet: the step of the next look
        self.judged = 0  # the step in which drafts were last found not to pay
        self.judged_at: int | None = None if other is None else other.judged_at  # at this size
        self.silent = 0  # the newest step without drafts
        self.plain_steps = 0 if other is None else PLAIN

    def gain(self) -> tuple[float, float]:
        """The speed with drafts over the speed without, and the same ratio if drafts cost OPTIMISM standard deviations
        less than estimated. At least one step had drafts.
        """
        looks, generated = self.drafting.looks, self.drafting.generated
        plain, others = (self.plain.looks, self.plain.generated) if self.plain.steps else (NOTHING, 1.0)
        speed = others / self.prices.price(plain)
        price = self.prices.price(looks)
        at_best = max(price - OPTIMISM * self.prices.doubt(looks, plain), LEAST_SHARE * price)
        return generated / price / speed, generated / at_best / speed


class _Steps:
    """The prices at every size of the batch, learned from every step."""

    def __init__(self, token: float | None = None) -> None:
        self._token = token
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the batch, in half octaves
        self._here = _Size(token=token)
        self._size = 0
        self._number = 0
        self._asked = False  # in the step under way

    @property
    def drafter(self) -> DrafterCost | None:
        """What the model's own drafter costs at the batch of the newest step, in units of a step that asks for drafts
        if the newest did, as `value` is, else of a plain step; None while that is not known.
        """
        return self._here.prices.drafter(self._asked)

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
        if not 0 < seconds < math.inf:
            self._wake()
            return
        if prefill:
            return
        here, drafted = self._here, tokens - sequences
        looks = looks_of(self._asked, drafted / sequences, model_tokens)
        if looks == NOTHING and self._quiet and self._number % WATCHED:
            return
        here.prices.observe(self._number, seconds, sequences, looks)
        here.plain_steps += not self._asked
        if generated is not None:
            rate = here.drafting if self._asked else here.plain
            rate.add(sequences, generated, looks)
            self._judge(sequences)

    @property
    def _quiet(self) -> bool:
        """Whether steps without drafts are the rule, and known."""
        return not self._here.asks and self._here.plain_steps >= PLAIN

    def _move(self, size: int) -> None:
        if size not in self._sizes:
            nearest = min(self._sizes, key=lambda other: abs(other - size), default=None)
            other, distance = (None, 0) if nearest is None else (self._sizes[nearest], abs(nearest - size))
            self._sizes[size] = _Size(other, distance, self._token)
            self._sizes[size].silent = self._number
            at = self._sizes[size].judged_at
            if at is not None and abs(size - at) < OTHER_BATCH:
                self._sizes[size].until = self._number + SHORTEST_PAUSE
        self._here = self._sizes[size]
        self._size = size

    def _wake(self) -> None:
        """After a time without requests the next may be of another epoch, which has more history: looks at once."""
        for size in self._sizes.values():
            if self._number - size.judged >= LONGEST_PAUSE // 2:
                size.pause, size.until = SHORTEST_PAUSE, self._number

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
    def told(self) -> float:
        """What the server is told, for people: while drafts do not pay, a cost at which none is asked for."""
        return self.value if self._here.asks else max(self.value, HOPELESS_VERIFY_COST)

    @property
    def learned(self) -> bool:
        """Whether `value` was measured."""
        return self._here.prices.verify_cost_known

    def next(self) -> float | None:
        """The cost to ask for the next drafts with; None: do not ask, and take this step without."""
        here = self._here
        if here.plain_steps < PLAIN:
            self._asked = False
        elif here.asks:
            self._asked = self._number - here.silent < (EAGER if self._doubtful() else PATIENT)
        else:
            self._asked = self._number >= here.until
        if self._asked:
            if not here.asks:
                return min(self.value, MODERATE)
            vary = self._number % VARIED == 0 and not here.prices.verify_cost_sure
            return max(self.value, min(SHORTER * self.value, MODERATE)) if vary else self.value
        here.silent = self._number
        return None

    def _doubtful(self) -> bool:
        """Whether a step without drafts would say much: about the price of drafts, or whether they pay."""
        if not (self.learned and self._here.drafting.steps):
            return True
        gain, at_best = self._here.gain()
        return at_best > (1 + SETTLED) * gain and gain < max(1.0, (at_best / gain) ** 2)

    def _judge(self, sequences: int) -> None:
        if not self._asked:
            return
        here = self._here
        least, most = LOOK_STEPS
        if here.drafting.steps < min(max(least, LOOK / sequences), most):
            return
        if here.gain()[1] >= (1 if here.asks else GAIN):
            here.asks, here.pause = True, SHORTEST_PAUSE
            return
        here.pause = SHORTEST_PAUSE if here.asks else min(2 * here.pause, LONGEST_PAUSE)
        here.asks, here.judged, here.until = False, self._number, self._number + here.pause
        here.judged_at = self._size
        here.drafting.clear()


class FixedCost(_Steps):
    """A `verify_cost` that the user has set. Only the cost of the model's own drafter is learned."""

    learned = False

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.value = self.told = value
        self._drafts = value < HOPELESS_VERIFY_COST

    def next(self) -> float | None:
        """The value, as long as anything can be drafted at it."""
        self._asked = self._drafts
        return self.value if self._drafts else None

    @property
    def _quiet(self) -> bool:
        return not self._drafts and self._here.plain_steps >= PLAIN
