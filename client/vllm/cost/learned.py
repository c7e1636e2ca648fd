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
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 512  # steps between two looks

OTHER_BATCH = 2  # half octaves, beyond which what was found to pay or not says little
LEAST_SHARE = 0.1  # of the price that is believed, which it is at best

NOTHING = looks_of(False, 0.0, None)
RAN_MEMORY = 4  # steps
SOON = 64  # steps after a look, within which a time without requests is no reason for another
FIRST_LOOK = 8  # the step of the first, where the model's own drafter drafts meanwhile
FEW_UNTOLD = 4  # steps; the message after more of them carries all their tokens, and is dearer than others
WATCHED = 8  # of steps in which nothing is asked, verified or drafted, the share that is learned from


class _Size:
    """What is known at one size of the batch."""

    def __init__(self, other: "_Size | None" = None, distance: float = 0.0, token: float | None = None) -> None:
        self.prices: StepPrices = StepPrices(None if other is None else other.prices, distance, token)
        # Of steps that ask for drafts, and of those that do not; without and with the model's own drafter.
        self.drafting, self.plain = (Rate(), Rate()), (Rate(), Rate())
        self.ran = 0.0  # share of the latest steps that do not ask, in which that drafter did
        self.asks: bool = other is None or other.asks
        self.pause = SHORTEST_PAUSE
        self.until = 0  # while quiet: the step of the next look
        self.judged = 0  # the step in which drafts were last found not to pay
        self.judged_at: int | None = None if other is None else other.judged_at  # at this size
        self.silent = 0  # the newest step without drafts
        self.plain_steps = 0 if other is None else PLAIN

    @property
    def beside(self) -> bool:
        """Whether the model's own drafter runs where nothing is asked for."""
        return self.ran > 0.5

    def forget_drafting(self) -> None:
        """What drafts give now is to be seen anew."""
        for rate in self.drafting:
            rate.clear()

    def gain(self, drafter: bool, beside: bool) -> tuple[float, float]:
        """The speed with drafts over the speed without, and the same ratio if drafts cost OPTIMISM standard deviations
        less than estimated. At least one step had drafts.

        Args:
            drafter: the model's own runs in the steps with drafts.
            beside: and in those without.
        """
        drafting, plain = self.drafting[drafter], self.plain[beside]
        others, generated = (plain.looks, plain.generated) if plain.steps else (NOTHING, 1.0)
        speed = generated / self.prices.price(others)
        price = self.prices.price(drafting.looks)
        at_best = max(price - OPTIMISM * self.prices.doubt(drafting.looks, others), LEAST_SHARE * price)
        return drafting.generated / price / speed, drafting.generated / at_best / speed


class _Steps:
    """The prices at every size of the batch, learned from every step."""

    def __init__(self, token: float | None = None) -> None:
        self._token = token
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the batch, in half octaves; the first is `_here`
        self._here = _Size(token=token)
        self._size = 0
        self._number = 0
        self._asked = False  # in the step under way
        self._model_tokens: int | None = None  # that the model's own drafter made in the newest step
        self._drafter = False  # it made what that step verified
        self._untold = 0  # steps since drafts were asked for

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
        before, self._model_tokens = self._model_tokens, model_tokens
        catches_up = self._asked and self._untold > FEW_UNTOLD
        self._untold = 0 if self._asked else self._untold + 1
        if sequences < 1:
            return
        self._move(round(2 * math.log2(sequences)))
        if not 0 < seconds < math.inf:
            self._wake()
            return
        if prefill or catches_up:
            return
        here, drafted = self._here, tokens - sequences
        looks = looks_of(self._asked, drafted / sequences, model_tokens)
        if looks == NOTHING and self._quiet and self._number % WATCHED:
            return
        here.prices.observe(self._number, seconds, sequences, looks)
        here.plain_steps += not self._asked
        # What came out of the step was drafted in the one before.
        self._drafter = before is not None
        if not self._asked:
            here.ran += (self._drafter - here.ran) / RAN_MEMORY
        if generated is not None:
            looks = looks_of(self._asked, drafted / sequences, before)
            (here.drafting if self._asked else here.plain)[self._drafter].add(sequences, generated, looks)
            self._judge(sequences)

    @property
    def _quiet(self) -> bool:
        """Whether steps without drafts are the rule, and known."""
        return not self._here.asks and self._here.plain_steps >= PLAIN

    def _move(self, size: int) -> None:
        if not self._sizes:
            self._sizes[size] = self._here
        elif size not in self._sizes:
            nearest = min(self._sizes, key=lambda other: abs(other - size))
            new = _Size(self._sizes[nearest], abs(nearest - size), self._token)
            new.silent = self._number
            if new.judged_at is not None and abs(size - new.judged_at) < OTHER_BATCH:
                new.until = self._number + SHORTEST_PAUSE
            self._sizes[size] = new
        self._here = self._sizes[size]
        self._size = size

    def _wake(self) -> None:
        """After a time without requests the next may be of another epoch, which has more history: looks at once."""
        for size in self._sizes.values():
            if self._number - size.judged >= SOON:
                size.pause, size.until = SHORTEST_PAUSE, self._number

    def _judge(self, sequences: int) -> None:
        """A step was added to the rates."""


class LearnedCost(_Steps):
    """Told what each step took and gave, answers with which `verify_cost` to ask for the next drafts."""

    def __init__(self, alone: bool = True) -> None:
        """`alone`: the model has no drafter of its own. Where it has, the engine begins without the server's drafts."""
        super().__init__()
        self._look: float = LOOK_STEPS[1]  # steps of a look at the batch of the newest step
        self._here.asks, self._here.until = alone, FIRST_LOOK

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

    @property
    def asks(self) -> bool:
        """Whether drafts pay at the batch of the newest step, so that steps without any are the exception."""
        return self._here.asks

    @property
    def apart(self) -> bool:
        """Whether the model's own drafter is to be left out of the next step: the server's drafts are looked at alone.

        They may pay without that drafter where both together do not.
        """
        here = self._here
        return self._asked and not here.asks and here.beside and here.drafting[True].steps >= self._look

    def _doubtful(self) -> bool:
        """Whether a step without drafts would say much: about the price of drafts, or whether they pay."""
        here, drafter = self._here, self._drafter
        if not (self.learned and here.drafting[drafter].steps) or (drafter and not here.plain[drafter].steps):
            return True
        gain, at_best = here.gain(drafter, drafter)
        return at_best > (1 + SETTLED) * gain and gain < max(1.0, (at_best / gain) ** 2)

    def _judge(self, sequences: int) -> None:
        if not self._asked:
            return
        here = self._here
        least, most = LOOK_STEPS
        self._look = min(max(least, LOOK / sequences), most)
        beside = self._drafter if here.asks else here.beside
        # While that drafter rests beside the server's drafts, what both gave together is out of reach.
        seen = [drafter for drafter in {False, beside} if here.drafting[drafter].steps >= self._look]
        if beside and not here.asks and len(seen) < 2 and here.drafting[True].steps < 2 * self._look:
            return  # where it cannot be left out, both are all there is to see
        if not seen:
            return
        if max(here.gain(drafter, beside)[1] for drafter in seen) >= (1 if here.asks else GAIN):
            here.asks, here.pause = True, SHORTEST_PAUSE
            return
        here.pause = SHORTEST_PAUSE if here.asks else min(2 * here.pause, LONGEST_PAUSE)
        here.asks, here.judged, here.until = False, self._number, self._number + here.pause
        here.judged_at = self._size
        here.forget_drafting()


class FixedCost(_Steps):
    """A `verify_cost` that the user has set. Only the cost of the model's own drafter is learned."""

    learned = False

    apart = False

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.value = self.told = value
        self.asks = value < HOPELESS_VERIFY_COST

    def next(self) -> float | None:
        """The value, as long as anything can be drafted at it."""
        self._asked = self.asks
        return self.value if self.asks else None

    @property
    def _quiet(self) -> bool:
        return not self.asks and self._here.plain_steps >= PLAIN
