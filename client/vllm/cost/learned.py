"""Decides with which `verify_cost` to ask for the next drafts, and whether to ask at all.

The measure is the time per token with drafts against the time without. So the engine takes steps of both kinds. While
drafts pay, it takes a single step without them at intervals. While they do not pay, it takes a few steps with drafts, a
trial, when the server's drafts promise to nearly pay, and at growing intervals. For the promise, the scheduler asks for
drafts now and then that no step verifies: most of the price of a draft is its verification.
"""

import math

from histospec.protocol.costs import DEFAULT_VERIFY_COST, HOPELESS_VERIFY_COST

from .prices import DrafterCost, Looks, StepPrices, looks_of
from .promise import Promise
from .rates import Rate

LOWEST, HIGHEST = 0.01, 1.0
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
PROMISE_MEMORY = 4  # promises

OTHER_BATCH = 2  # half octaves: for a batch size that differs by more, an earlier result says little
LEAST_SHARE = 0.1  # the most optimistic price is at least this share of the estimate

NOTHING = looks_of(False, 0.0, None)
RAN_MEMORY = 4  # steps
# If the model's own drafter drafts from the start: the first step without any drafts, and the first step of a trial.
FIRST_BARE, FIRST_LOOK = 8, 64
WATCHED = 16  # learn from one in 16 of the steps in which nothing is asked, verified or drafted


class _Size:
    """The state for one size of the batch."""

    def __init__(self, other: "_Size | None" = None, distance: float = 0.0, token: float | None = None) -> None:
        self.prices: StepPrices = StepPrices(None if other is None else other.prices, distance, token)
        # Rates of steps that ask for drafts, and of steps that do not; each without and with the model's own drafter.
        self.drafting, self.plain = (Rate(), Rate()), (Rate(), Rate())
        self.ran = 0.0  # share of the latest steps without a request for drafts in which that drafter ran
        self.asks: bool = other is None or other.asks
        self.pause = SHORTEST_PAUSE
        self.until = 0  # while drafts do not pay: the step of the next trial
        self.soonest = 0  # the step from which on a promise starts one
        # The batch size in the step in which drafts were last found not to pay.
        self.judged_at: int | None = None if other is None else other.judged_at
        self.silent = 0  # the newest step without drafts
        self.plain_steps = 0 if other is None else PLAIN

    @property
    def model_drafts(self) -> bool:
        """Whether the model's own drafter runs in steps that ask the server for nothing."""
        return self.ran > 0.5

    def forget_drafting(self) -> None:
        """Forgets the rates of steps with drafts."""
        for rate in self.drafting:
            rate.clear()

    def gain(self, drafter: bool, without: bool) -> tuple[float, float]:
        """Returns how many times faster drafts are, as `gain_of`. At least one step must have had drafts.

        Args:
            drafter: the model's own drafter runs in the steps with drafts.
            without: it runs in the steps without drafts of the server.
        """
        drafting = self.drafting[drafter]
        return self.gain_of(drafting.generated, drafting.looks, without)

    def gain_of(self, generated: float, looks: Looks, without: bool) -> tuple[float, float]:
        """Returns how many times faster steps are than those without drafts of the server: by the estimated price, and
        if it is too high by OPTIMISM standard deviations.

        Args:
            generated: tokens per sequence of such a step.
            looks: its work.
            without: whether the model's own drafter runs in the steps without drafts of the server.
        """
        plain = self.plain[without]
        others, usual = (plain.looks, plain.generated) if plain.steps else (NOTHING, 1.0)
        speed = usual / self.prices.price(others)
        price = self.prices.price(looks)
        at_best = max(price - OPTIMISM * self.prices.doubt(looks, others), LEAST_SHARE * price)
        return generated / price / speed, generated / at_best / speed


class _Steps:
    """The prices for every size of the batch, learned from every step."""

    def __init__(self, token: float | None = None) -> None:
        self._token = token
        self._sizes: dict[int, _Size] = {}  # by the logarithm of the batch, in half octaves; the first is `_here`
        self._here = _Size(token=token)
        self._size = 0
        self._number = 0
        self._asked = False  # whether the current step asks for drafts
        self._passed = False  # whether the newest step passed
        self._begins = False  # whether it begins a trial, and is slower than later steps, whose code the caches hold
        self._model_tokens: int | None = None  # tokens that the model's own drafter made in the newest step
        self._drafter = False  # whether it ran in the step before, whose drafts the newest one verified
        self._bare_steps = 0  # that neither asked nor verified, nor ran that drafter
        self._promise: Promise | None = None  # mean of the latest ones since the engine was idle

    @property
    def drafter(self) -> DrafterCost | None:
        """The cost of the model's own drafter at the batch size of the newest step; None while it is unknown.

        The unit is a step that asks for drafts if the newest one did, as for `value`; else a step without drafts.
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
        """Learns from one step.

        Args:
            seconds: from the end of the step before to its own; infinite or nan if unknown (idle time).
            sequences: how many sequences it computed.
            tokens: how many tokens were scheduled, drafted ones included.
            prefill: whether it also computed prompts. Such a step can be compared with no other.
            model_tokens: how many tokens the model's own drafter made for each sequence; None: it did not run.
            generated: how many tokens the step yielded; None: unknown, so it teaches nothing about the yield of drafts.
        """
        self._number += 1
        before, self._model_tokens = self._model_tokens, model_tokens
        passed, self._passed = self._passed, False
        if sequences < 1:
            return
        self._move(round(2 * math.log2(sequences)))
        if not 0 < seconds < math.inf:
            self._wake()
            return
        drafted = tokens - sequences
        nothing = not (self._asked or drafted) and model_tokens is None
        if prefill or passed or (nothing and self._number % WATCHED and self._quiet):
            return
        here = self._here
        looks = looks_of(self._asked, drafted / sequences, model_tokens)
        self._bare_steps += nothing
        if not self._begins:
            here.prices.observe(self._number, seconds, sequences, looks)
        here.plain_steps += not self._asked
        # The tokens that the step yielded were drafted in the step before.
        self._drafter = before is not None
        if not self._asked:
            here.ran += (self._drafter - here.ran) / RAN_MEMORY
        if generated is not None:
            looks = looks_of(self._asked, drafted / sequences, before)
            (here.drafting if self._asked else here.plain)[self._drafter].add(sequences, generated, looks)
            self._judge(sequences)

    def _wake(self) -> None:
        """Lets the next promise start a trial: after an idle time the problems may have more history."""
        self._promise = None
        for size in self._sizes.values():
            size.pause, size.soonest = SHORTEST_PAUSE, 0

    def passes(self) -> bool:
        """Counts a step if it teaches nothing: then the caller leaves out `observe` and `next`, and asks for no drafts.

        Call it only for a step that verified no drafts, and in which no drafter of the model's ran. The caller need not
        measure the time at its end: the first step after it teaches nothing of the price of steps.
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
            new = _Size(self._sizes[nearest], abs(nearest - size), self._token)
            new.silent = self._number
            if new.judged_at is not None and abs(size - new.judged_at) < OTHER_BATCH:
                new.until = self._number + SHORTEST_PAUSE
            self._sizes[size] = new
        self._here = self._sizes[size]
        self._size = size

    def _judge(self, sequences: int) -> None:
        """Decides again whether drafts pay, after a step was added to the rates."""


class LearnedCost(_Steps):
    """Learns from the time and the tokens of each step with which `verify_cost` to ask for the next drafts."""

    def __init__(self, alone: bool = True) -> None:
        """`alone`: the model has no drafter of its own. With one, the engine starts without the server's drafts."""
        super().__init__()
        self._look: float = LOOK_STEPS[1]  # steps of a trial at the batch size of the newest step
        self._here.asks, self._here.until = alone, FIRST_LOOK

    @property
    def value(self) -> float:
        """The cost at the batch size of the newest step; DEFAULT_VERIFY_COST while too little is known."""
        prices = self._here.prices
        return min(max(prices.verify_cost, LOWEST), HIGHEST) if prices.verify_cost_known else DEFAULT_VERIFY_COST

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
        before = self._promise or promise
        self._promise = Promise(*(a + (b - a) / PROMISE_MEMORY for a, b in zip(before, promise, strict=True)))
        here = self._here
        if here.asks or self._number < here.soonest:
            return
        tokens, drafted = self._promise
        if here.gain_of(tokens, looks_of(True, drafted, None), here.model_drafts)[1] >= PROMISING:
            here.until = min(here.until, self._number)

    @property
    def asks(self) -> bool:
        """Whether drafts pay at the batch size of the newest step, so that steps without them are the exception."""
        return self._here.asks

    @property
    def looks_next(self) -> bool:
        """Whether a trial of drafts begins after the next step.

        The scheduler reports first, so that the first request of the trial costs what later ones do.
        """
        return not self._here.asks and self._number + 1 == self._here.until

    @property
    def apart(self) -> bool:
        """Whether to leave the model's own drafter out of the next step, to measure what is unknown.

        That is the unit of all prices, the time of a step without any drafts; and the server's drafts alone, which may
        pay even if both together do not.
        """
        here = self._here
        if not self._asked:
            return self._number >= FIRST_BARE and self._bare_steps < PLAIN
        return not here.asks and here.model_drafts and here.drafting[True].steps >= self._look

    def _doubtful(self) -> bool:
        """Returns whether a step without drafts would tell much about the price of drafts, or whether they pay."""
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
        tried = [drafter for drafter in (False, True) if here.drafting[drafter].steps >= self._look]
        if here.asks:
            without = self._drafter
            # While that drafter rests during the server's drafts, the rate of both together is not available.
            tried = [drafter for drafter in tried if drafter <= without]
        else:
            without = here.model_drafts
            if without and len(tried) < 2 and here.drafting[True].steps < 2 * self._look:
                return  # wait for steps without that drafter; if it cannot be left out, judge both together
        if not tried:
            return
        if max(here.gain(drafter, without)[1] for drafter in tried) >= (1 if here.asks else GAIN):
            if not here.asks:
                here.asks = True
                here.prices.loosen()
            return
        here.pause = min(LONGER_PAUSE * here.pause, LONGEST_PAUSE)
        here.asks, here.judged_at = False, self._size
        here.until, here.soonest = self._number + here.pause, self._number + here.pause // SOONER
        here.forget_drafting()


class FixedCost(_Steps):
    """A `verify_cost` that the user has set. Learns only the cost of the model's own drafter."""

    learned = apart = looks_next = curious = False

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.value = self.told = self.moderate = value
        self.asks = value < HOPELESS_VERIFY_COST

    def promised(self, promise: Promise) -> None:
        """Learns nothing from it."""

    def next(self) -> float | None:
        """Returns the value; None if nothing would be drafted at it."""
        self._asked = self.asks
        return self.value if self.asks else None

    @property
    def _quiet(self) -> bool:
        return not self.asks and self._here.plain_steps >= PLAIN
