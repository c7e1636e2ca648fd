"""Decides with which `verify_cost` to ask for the next drafts, and whether to ask at all.

The measure is the time per token with drafts against the time without. So the engine takes steps of both kinds. While
drafts pay, it takes a single step without them at intervals. While they do not pay, it takes a few steps with drafts, a
trial, when the server's drafts promise to nearly pay, and at growing intervals. For the promise, the scheduler asks for
drafts now and then that no step verifies: most of the price of a draft is its verification.
"""

import math

from histospec.client.vllm.choice.clock import WATCHED
from histospec.client.vllm.choice.prices import NOTHING, Looks, StepPrices, half_octaves, looks_of
from histospec.client.vllm.choice.promise import Promise
from histospec.client.vllm.choice.rates import Rate
from histospec.protocol.costs import HOPELESS_VERIFY_COST

MODERATE = 0.25  # the highest cost to try drafts with: likely tokens, which nearly pay for themselves

EAGER, PATIENT = 6, 256  # steps from one without drafts to the next: while in doubt, and later
SETTLED = 0.05  # doubt about the price of a step that is small enough, as a share of the price
VARIED, SHORTER = 4, 3.0  # while the cost is uncertain, every 4th step asks at 3 times the cost, for shorter drafts
PLAIN = 3  # steps without drafts before any with them: their time is the unit of all prices
LOOK = 48  # sequences times steps of a trial of drafts,
LOOK_STEPS = 2, 16  # which takes from 2 to 16 steps
OPTIMISM = 1.0  # assume steps with drafts cheaper by this many standard deviations, so that they are tried
GAIN = 1.02  # drafts must be faster by this factor before the engine asks again
SHORTEST_PAUSE, LONGEST_PAUSE = 64, 1024  # steps between two trials,
LONGER_PAUSE = 4  # each time this many times as many
PROMISING = 0.95  # drafts are tried if they promise this gain at best
SOONER = 8  # such a trial begins after an eighth of the pause

OTHER_BATCH = 2  # half octaves: for a batch size that differs by more, an earlier result says little
LEAST_SHARE = 0.1  # the most optimistic price is at least this share of the estimate


class _Size:
    """The state for one size of the batch."""

    def __init__(self, other: "_Size | None" = None, distance: float = 0.0) -> None:
        self.prices: StepPrices = StepPrices(None if other is None else other.prices, distance)
        self.drafting = Rate()  # of steps that ask for drafts
        self.asks: bool = other is None or other.asks
        self.pause = SHORTEST_PAUSE
        self.until = 0  # while drafts do not pay: the step of the next trial
        self.soonest = 0  # the step from which on a promise starts one
        # The batch size in the step in which drafts were last found not to pay.
        self.judged_at: int | None = None if other is None else other.judged_at
        self.silent = 0  # the newest step without drafts
        self.plain_steps = 0 if other is None else PLAIN

    def gain(self) -> tuple[float, float]:
        """Returns how many times faster drafts are, as `gain_of`. At least one step must have had drafts."""
        return self.gain_of(self.drafting.generated, self.drafting.looks)

    def gain_of(self, generated: float, looks: Looks) -> tuple[float, float]:
        """Returns how many times faster steps are than those without drafts: by the estimated price, and if it is too
        high by OPTIMISM standard deviations.

        Args:
            generated: tokens per sequence of such a step.
            looks: its work.
        """
        price = self.prices.price(looks)
        at_best = max(price - OPTIMISM * self.prices.doubt(looks, NOTHING), LEAST_SHARE * price)
        return generated / price, generated / at_best


class LearnedCost:
    """Learns from the time and the tokens of each step with which `verify_cost` to ask for the next drafts."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the batch, in half octaves; the first is `_here`
        self._here = _Size()
        self._size = 0
        self._number = 0
        self._asked = False  # whether the current step asks for drafts
        self._passed = False  # whether the newest step passed
        self._begins = False  # whether it begins a trial, and is slower than later steps, whose code the caches hold
        self._promise: Promise | None = None  # mean of the latest ones since the engine was idle
        self._look: float = LOOK_STEPS[1]  # steps of a trial at the batch size of the newest step

    def observe(
        self, seconds: float, sequences: int, tokens: int, alone: bool = False, generated: int | None = None
    ) -> None:
        """Learns from one step.

        Args:
            seconds: from the end of the step before to its own; infinite or nan if unknown (idle time).
            sequences: how many sequences it computed.
            tokens: how many tokens were scheduled, drafted ones included.
            alone: whether it can be compared with no other: it computed prompts, too, or compiled kernels.
            generated: how many tokens the step yielded; None: unknown, so it teaches nothing about the yield of drafts.
        """
        self._number += 1
        passed, self._passed = self._passed, False
        if sequences < 1:
            return
        self._move(half_octaves(sequences))
        if not 0 < seconds < math.inf:
            self._wake()
            return
        drafted = tokens - sequences
        nothing = not (self._asked or drafted)
        if alone or passed or (nothing and self._number % WATCHED and self._quiet):
            return
        here = self._here
        looks = looks_of(self._asked, drafted / sequences, None)
        if not self._begins:
            here.prices.observe(self._number, seconds, sequences, looks)
        here.plain_steps += not self._asked
        if generated is not None and self._asked:
            here.drafting.add(sequences, generated, looks)
            self._judge(sequences)

    def _wake(self) -> None:
        """Lets the next promise start a trial: after an idle time the problems may have more history."""
        self._promise = None
        for size in self._sizes.values():
            size.pause, size.soonest = SHORTEST_PAUSE, 0

    def passes(self) -> bool:
        """Counts a step if it teaches nothing: then the caller leaves out `observe` and `next`, and asks for no drafts.

        Call it only for a step that verified no drafts. The caller need not measure the time at its end: the first step
        after it teaches nothing of the price of steps.
        """
        number = self._number + 1
        if self._asked or not self._quiet or number % WATCHED in (0, WATCHED - 1):
            return False
        self._number = self._here.silent = number
        self._passed = True
        return True

    @property
    def _quiet(self) -> bool:
        """Whether steps without drafts are the rule, and their price is known, and no trial begins soon."""
        here = self._here
        return not here.asks and here.plain_steps >= PLAIN and self._number + WATCHED < here.until

    def _move(self, size: int) -> None:
        if not self._sizes:
            self._sizes[size] = self._here
        elif size not in self._sizes:
            nearest = min(self._sizes, key=lambda other: abs(other - size))
            new = _Size(self._sizes[nearest], abs(nearest - size))
            new.silent = self._number
            if new.judged_at is not None and abs(size - new.judged_at) < OTHER_BATCH:
                new.until = self._number + SHORTEST_PAUSE
            self._sizes[size] = new
        self._here = self._sizes[size]
        self._size = size

    @property
    def value(self) -> float:
        """The cost at the batch size of the newest step; DEFAULT_VERIFY_COST while too little is known."""
        return self._here.prices.cost

    @property
    def told(self) -> float:
        """The cost to report to the server, for its metrics; while drafts do not pay, one at which none is drafted."""
        return self.value if self._here.asks else max(self.value, HOPELESS_VERIFY_COST)

    @property
    def learned(self) -> bool:
        """Whether `value` was measured."""
        return self._here.prices.verify_cost_known

    def next(self) -> float | None:
        """Returns the cost to ask for the next drafts with; None: take this step without drafts."""
        here, asked = self._here, self._asked
        if here.plain_steps < PLAIN:
            self._asked = False
        elif here.asks:
            self._asked = self._number - here.silent < (EAGER if self._doubtful() else PATIENT)
        else:
            self._asked = self._number >= here.until
        self._begins = self._asked and not asked and not here.asks and self._look > LOOK_STEPS[0]
        if self._asked:
            if not here.asks:
                return self.moderate
            vary = self._number % VARIED == 0 and not here.prices.verify_cost_sure
            return max(self.value, min(SHORTER * self.value, MODERATE)) if vary else self.value
        here.silent = self._number
        return None

    @property
    def curious(self) -> bool:
        """Whether to ask for drafts now and then that no step verifies, for `promised`."""
        return not self._here.asks

    @property
    def moderate(self) -> float:
        """The cost to ask with for drafts that may not pay."""
        return min(self.value, MODERATE)

    def promised(self, promise: Promise) -> None:
        """Takes what such drafts promise, asked for at the cost `moderate`. Starts a trial if that nearly pays."""
        self._promise = promise.after(self._promise)
        here = self._here
        if here.asks or self._number < here.soonest:
            return
        tokens, drafted = self._promise
        if here.gain_of(tokens, looks_of(True, drafted, None))[1] >= PROMISING:
            here.until = min(here.until, self._number)

    @property
    def looks_next(self) -> bool:
        """Whether a trial of drafts begins after the next step.

        The scheduler reports first, so that the first request of the trial costs what later ones do.
        """
        return not self._here.asks and self._number + 1 == self._here.until

    def _doubtful(self) -> bool:
        """Returns whether a step without drafts would tell much about the price of drafts, or whether they pay."""
        here = self._here
        if not (self.learned and here.drafting.steps):
            return True
        gain, at_best = here.gain()
        return at_best > (1 + SETTLED) * gain and gain < max(1.0, (at_best / gain) ** 2)

    def _judge(self, sequences: int) -> None:
        here = self._here
        least, most = LOOK_STEPS
        self._look = min(max(least, LOOK / sequences), most)
        if here.drafting.steps < self._look:
            return
        if here.gain()[1] >= (1 if here.asks else GAIN):
            if not here.asks:
                here.asks = True
                here.prices.loosen()
            return
        here.pause = min(LONGER_PAUSE * here.pause, LONGEST_PAUSE)
        here.asks, here.judged_at = False, self._size
        here.until, here.soonest = self._number + here.pause, self._number + here.pause // SOONER
        here.drafting.clear()
