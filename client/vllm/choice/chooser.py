"""Decides how an engine drafts: not at all, with the server, with the model's own drafter, or with both.

The engine changes its mode when the expected advantages of another one add up (a cumulative sum; E. S. Page,
"Continuous Inspection Schemes", Biometrika 1954). It tries a mode for a few steps, a trial, if that might pay by a
price that is not known well, and again at growing intervals. While the server is not asked, the scheduler asks it now
and then for drafts that no step verifies: they promise what its drafts would yield, and most of the price of a draft is
its verification. Only steps count that draft in the same mode as the step before: each step verifies the drafts of the
step before, and the first step of a kind is slower, because its code has left the caches.

A drafter that rests reads no prompts, so it can draft nothing for these requests later (DrafterCoverage). It therefore
begins to work again only when requests begin, and rests only when its price is known.
"""

import math

from histospec.client.vllm.choice.drafts import Outcomes
from histospec.client.vllm.choice.modes import FIRST_PAUSE, NO_DRAFTER, NOTHING, REST, Limits, Mode, Pauses
from histospec.client.vllm.choice.prices import LOWEST, work_of
from histospec.client.vllm.choice.worth import STARTING, LevelGains, Promise, Worth
from histospec.protocol.costs import HOPELESS_VERIFY_COST

WATCHED = 16  # of the steps in which nothing drafts, one in 16 is measured
WEIGH = 8  # steps between two comparisons of the modes
FEWEST = 4  # steady steps in a mode before it is compared
SIZE_STEPS = 24  # steady steps with a size of the batch before another mode is tried, if the drafter works
ENOUGH = 1.0  # sum of the advantages of a mode, in tokens, at which the engine changes to it
OPTIMISM = 1.0  # a mode is tried if it pays at a price this many standard deviations lower
TRIAL = 32  # a trial covers 32 request-steps,
TRIAL_STEPS = 3, 8  # within 3 to 8 steps: a longer gap would spoil the drafter's later tokens
LASTED = 256  # steps after which it was no mistake to have changed to a mode
BETTER = 1.25  # the server's drafts are tried at once if they promise this many times the tokens of the last failure
STALE = 512
"""Steps after which steps without drafts are measured again. With 1,024, 2 of 3 simulated engines knew only half of the
price of a token 4,000 steps after it had risen from 0.05 to 1."""
UNASKED = 1024  # steps after which the server is tried, whatever it promises; with 512, that costs more than 0.5 %
OTHER_BATCH = 2  # half octaves: if the batch differs by so much, an earlier failure says little
UNSTEADY = 128  # steps of which none could be compared, after which the server is asked
PROMISING = 1.5  # if its drafts promise so many tokens
OVERDUE = 4  # a drafter is tried in the midst of requests if it has rested this many times as long as it must
READ = 0.9  # share of the requests that the drafter must have read, for its yield to count
WAIT = 32  # give up if that share has not risen in 32 steps
MODERATE = 0.25  # the highest cost to try drafts with: likely tokens, which nearly pay for themselves
LONGER = 0.4
"""Share of the cost with which to ask the server for drafts that are compared with the model's. Tokens that the model
drafts, too, are more likely than the server knows, so longer drafts pay. The comparison cuts tokens that do not pay."""
VARY = 4, 64  # steps between two changes of the number of tokens: while a price is unknown, and later
CHEAPER, CHEAPER_ALONE = 0.25, 0.5
"""Share of the price of verifying a token in a step whose drafts are longer, to learn that price: with the model's
drafter, and with the server alone, for which 0.25 makes the cost for 256 requests on a GPU come out twice too high."""


class ModeChooser:
    """Decides, after each step, who drafts next, and how many tokens the drafter makes. Not thread-safe."""

    def __init__(
        self,
        verify_cost: float | None = None,
        limits: Limits = NO_DRAFTER,
        drafter: tuple[Outcomes, LevelGains] | None = None,
    ) -> None:
        """Starts without knowledge.

        Args:
            verify_cost: the cost that the user has set, at which the server is always asked, or never; None: learn it.
            limits: what the model's own drafter can do.
            drafter: what it yields, alone and with the server; None: the model has none.
        """
        asked = (False, True) if verify_cost is None else (verify_cost < HOPELESS_VERIFY_COST,)
        modes = [Mode(server, drafts) for drafts in limits.runs for server in asked]  # the simplest first
        self._limits, self._fixed, self._modes = limits, verify_cost, frozenset(modes)
        self._worth = Worth(modes, verify_cost, drafter)
        self._pauses = Pauses(modes)
        self._evidence = dict.fromkeys(modes, 0.0)
        self._mode = Mode(asked[0], limits.runs[-1])
        self._back: Mode | None = None  # the mode in use before a trial; None: there is no trial
        self._tried_at = 0  # the step in which the newest trial began
        self._changed = False  # whether the engine changed to the mode in use
        self._settled = 0  # steady steps in it
        self._waited = 0  # steps in it in which the drafter had not read enough of the requests
        self._read_before = 0.0  # the share that it had read, WAIT such steps ago
        self._number = 0
        self._weighed = 0  # the step of the last comparison
        self._was: Mode | None = None  # who drafted in the newest step
        self._passed = False  # whether it passed: the clock was not read, so the next step teaches nothing
        self._asked = self._mode.server  # whether the server was asked for its drafts
        self._left = dict.fromkeys(modes, 0)  # the step in which the engine last left each mode
        self._unsteady = 0  # steps since the last one that could be compared
        self._refused = math.inf  # tokens with the server when it last did not pay,
        self._refused_size = 0  # and the size of the batch, in half octaves
        self.read = 1.0
        """Share of the running requests that the drafter has read; the caller sets it."""

    # ---- what to do next --------------------------------------------------------------------------------------------

    @property
    def value(self) -> float:
        """The cost of a drafted token at the batch size of the newest step; DEFAULT_VERIFY_COST while unknown."""
        return self._worth.prices.cost if self._fixed is None else self._fixed

    @property
    def learned(self) -> bool:
        """Whether `value` was measured."""
        return self._fixed is None and self._worth.prices.verify_cost_known

    @property
    def moderate(self) -> float:
        """The cost to ask with for drafts that may not pay."""
        return min(self.value, MODERATE)

    @property
    def curious(self) -> bool:
        """Whether to ask for drafts now and then that no step verifies, for `promised`."""
        return self._fixed is None and not self._mode.server

    @property
    def price(self) -> float:
        """The price of verifying a token, in tokens that the time would yield otherwise.

        Sometimes it is lower, so that longer drafts show what they cost.
        """
        return self._worth.token_price * (CHEAPER if self._varies else 1.0)

    def next(self) -> float | None:
        """Returns the cost to ask the server for the next drafts with; None: ask for none."""
        self._asked = self._mode.server
        if not self._asked:
            return None
        if self._mode.drafter:
            return LONGER * (self.value if self._back is None else self.moderate)
        if self._fixed is not None:
            return self._fixed
        if self._back is not None:
            return self.moderate
        return max(LOWEST, CHEAPER_ALONE * self.value) if self._varies else self.value

    @property
    def _varies(self) -> bool:
        return self._number % VARY[self._worth.prices.verify_cost_sure] == 0

    def number(self, sequences: int, prompts: bool) -> int:
        """Returns how many tokens the drafter makes in the step that begins, or REST.

        Args:
            sequences: how many sequences the step computes, at least 1.
            prompts: whether it computes prompts.
        """
        self._worth.move(sequences)
        limits, prices = self._limits, self._worth.prices
        if prompts and not self._mode.drafter:
            self._begin_requests()
        if not self._mode.drafter:
            return REST
        if not limits.may_vary:
            return limits.longest
        if limits.fixed is not None:
            return limits.fixed
        turn, rest = divmod(self._number, VARY[prices.drafter_known])
        vary = (1 if turn % 2 else -1) if rest == 0 else 0
        tokens = self._worth.tokens[self._mode.server] if prices.plain_known else STARTING
        return max(1, min(tokens + vary, limits.longest))

    def passes(self) -> bool:
        """Counts a step if it teaches nothing: then the caller leaves out `observe` and `next`, and asks for no drafts.

        Call it only for a step that verified no drafts, and in which the drafter did not run.
        """
        number = self._number + 1
        quiet = self._mode == self._was == NOTHING and self._back is None and self._settled >= WEIGH
        if not quiet or number % WATCHED in (0, WATCHED - 1):
            return False
        self._number, self._passed = number, True
        return True

    # ---- what it learns from ----------------------------------------------------------------------------------------

    def promised(self, promise: Promise) -> None:
        """Takes what drafts of the server promise that no step verifies, asked for at the cost `moderate`."""
        if self._worth.promised(promise) >= BETTER * self._refused:
            self._pauses.forgive_server()

    def observe(
        self,
        seconds: float,
        sequences: int,
        tokens: int,
        generated: int,
        alone: bool = False,
        model_tokens: int | None = None,
    ) -> None:
        """Learns from one step, and decides how to draft next.

        Args:
            seconds: from the end of the step before to its own; infinite or nan if unknown (idle time).
            sequences: how many sequences it computed.
            tokens: how many tokens were scheduled, drafted ones included.
            generated: how many tokens it yielded.
            alone: whether it can be compared with no other: it computed prompts, too, or compiled kernels.
            model_tokens: how many tokens the drafter made for each sequence; None: it did not run.
        """
        self._number += 1
        before, self._was = None if self._passed else self._was, Mode(self._asked, model_tokens is not None)
        self._passed = False
        if sequences < 1:
            return
        self._worth.move(sequences)
        if abs(self._worth.size - self._refused_size) >= OTHER_BATCH:
            self._refused_size = self._worth.size
            self._pauses.forgive_server()
        if not 0 < seconds < math.inf:
            self._wake()
            return
        if alone or before != self._was:
            self._unsteady += 1
            if self._unsteady >= UNSTEADY and self._back is None:
                self._trust_promises()
            return
        self._unsteady = 0
        work = work_of(self._asked, (tokens - sequences) / sequences, model_tokens)
        self._worth.prices.observe(self._number, seconds, sequences, work)
        if self._was != self._mode:
            return
        if self._mode.drafter and self.read < READ and self._without in self._modes:
            self._wait()
            return
        self._worth.rates[self._mode].add(sequences, generated, work)
        self._settled += 1
        if self._back is None:
            self._compare()
        elif self._settled >= min(max(TRIAL_STEPS[0], TRIAL / sequences), TRIAL_STEPS[1]):
            self._end_trial(self._back, self._settled * sequences)

    # ---- decisions --------------------------------------------------------------------------------------------------

    @property
    def _with(self) -> Mode:
        return Mode(self._mode.server, True)

    @property
    def _without(self) -> Mode:
        return Mode(self._mode.server, False)

    def _compare(self) -> None:
        """Changes to another mode, or begins to try one, if that promises to pay."""
        if self._settled < FEWEST or self._number - self._weighed < WEIGH:
            return
        now = self._weighed = self._number
        worth = self._worth.of_modes(self._mode)
        least = worth.pop(self._mode).tokens + self._worth.margin(self._mode)
        for mode, other in worth.items():
            advantage = other.tokens - least - min(other.doubt, other.doubt**3)  # a price in doubt must not decide
            self._evidence[mode] = min(max(0.0, self._evidence[mode] + advantage), ENOUGH)
        at_best = {m: o.tokens + OPTIMISM * o.doubt for m, o in worth.items() if self._may_change(m)}
        known = [m for m in at_best if self._left[m]]  # those that it has been in
        found = [m for m in known if self._evidence[m] >= ENOUGH and self._pauses.may_take(m, now)]
        tried = [m for m in at_best if at_best[m] > least and self._pauses.may_try(m, now)]
        prices = self._worth.prices
        with_server = Mode(True, self._mode.drafter)
        if found:
            self._change(max(found, key=at_best.__getitem__))
        elif self._mode.drafter and prices.steps < SIZE_STEPS:
            return  # the price of the mode in use, with this size of the batch, has to be known first
        elif NOTHING in worth and not prices.plain_known and self._pauses.may_try(NOTHING, now):
            self._try(NOTHING)  # its time is the unit of all prices
        elif tried:
            self._try(tried[0])  # the simplest mode first, whose price tells more of the others
        elif NOTHING in at_best and self._settled >= FIRST_PAUSE and now - self._left[NOTHING] >= STALE:
            self._try(NOTHING)
        elif with_server in at_best and (
            self._pauses.may_try(with_server, now) or now - self._left[with_server] >= UNASKED
        ):
            self._try(with_server)
        elif self._with in worth and self._pauses.rested(now, OVERDUE):
            self._try(self._with)

    def _trust_promises(self) -> None:
        """Asks the server if its drafts promise enough: no step can be compared, for example if each reads prompts."""
        with_server, promise = Mode(True, self._mode.drafter), self._worth.promise
        enough = promise is not None and promise.tokens >= PROMISING
        if enough and not self._mode.server and with_server in self._modes:
            self._change(with_server)

    def _may_change(self, mode: Mode) -> bool:
        """Returns whether the engine may change to a mode in the midst of requests.

        The drafter cannot begin, because it has not read them. It may rest once its price is known, and what it adds to
        the server's drafts.
        """
        if mode.drafter or not self._mode.drafter:
            return mode.drafter == self._mode.drafter
        return self._worth.prices.plain_known and (self._worth.known or not mode.server)

    def _begin_requests(self) -> None:
        """Lets the drafter work again if that pays or is to be tried, or ends a trial without it: requests begin."""
        if self._back is not None and self._back.drafter:
            self._pauses.cut_short(self._mode, self._number)
            self._return(self._back)
        elif self._back is None and self.read >= READ and self._with in self._modes:
            if self._worth.added(self._mode.server) > 0 and self._pauses.may_take(self._with, self._number):
                self._change(self._with)
            elif self._pauses.rested(self._number):
                self._try(self._with)

    def _wait(self) -> None:
        """Takes a step whose yield does not count, because the drafter has not read enough of the requests.

        It goes on if it pays for those that it has read, and if there are more of them from time to time.
        """
        self._waited += 1
        check, rises = self._waited % (WEIGH if self._back is None else WAIT) == 0, True
        if self._waited % WAIT == 0:
            rises, self._read_before = self.read > self._read_before, self.read
        if not rises or (check and self._worth.added(self._mode.server) <= 0):
            back, self._back = self._back, None
            self._changed = self._changed or back is not None
            self._change(self._without if back is None or back.drafter else back)

    def _try(self, mode: Mode) -> None:
        if mode.drafter and not self._mode.drafter:
            self._worth.fade()
        self._back, self._tried_at = self._mode, self._number + 1
        self._worth.rates[mode].clear()
        self._enter(mode)

    def _end_trial(self, back: Mode, samples: int) -> None:
        """Stays with the mode that was tried if it is faster than the one before."""
        if self._worth.is_faster(self._mode, back, samples):
            self._back, self._changed = None, True
            self._pauses.left(back, self._number, self._rests(back), mistaken=False)
        else:
            mode = self._mode
            self._return(back)
            self._pauses.tried(mode, self._number, self._rests(mode))
            self._refuse(mode)

    def _return(self, back: Mode) -> None:
        self._back = None
        self._enter(back)
        self._settled = FEWEST

    def _change(self, mode: Mode) -> None:
        left, mistaken = self._mode, self._changed and self._settled < LASTED
        self._worth.rates[mode].clear()
        self._enter(mode)
        self._changed = True
        self._pauses.left(left, self._number, self._rests(left), mistaken)
        if mistaken:
            self._refuse(left)

    def _enter(self, mode: Mode) -> None:
        self._left[self._mode] = self._number
        self._mode, self._settled, self._waited, self._read_before = mode, 0, 0, self.read
        self._evidence = dict.fromkeys(self._modes, 0.0)

    def _rests(self, left: Mode) -> bool:
        return left.drafter and not self._mode.drafter

    def _refuse(self, mode: Mode) -> None:
        if mode.server:
            rate, promise = self._worth.rates[mode], self._worth.promise
            measured = rate.generated if rate.steps else math.inf
            self._refused = measured if promise is None else max(measured, promise.tokens)
            self._refused_size = self._worth.size

    def _wake(self) -> None:
        """Notes that the engine was idle: other requests follow, perhaps with more history."""
        if self._back is not None and self._tried_at < self._number:
            self._return(self._back)
        self._settled = 0
        self._evidence = dict.fromkeys(self._modes, 0.0)
        self._worth.wake(self._mode)
