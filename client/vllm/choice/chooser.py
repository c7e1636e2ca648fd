"""Decides how an engine drafts whose model has a drafter of its own: not at all, with the server, the model, or both.

The engine changes its way when the expected advantages of another one add up (a cumulative sum; E. S. Page, "Continuous
Inspection Schemes", Biometrika 1954). It tries a way for a few steps if that might pay by a price that is not known
well, and again at growing intervals. Only steps count that draft in the same way as the step before: each step verifies
the drafts of the step before, and the first step of a kind is slower, because its code has left the caches.

A drafter that rests reads no prompts, so it can draft nothing for these requests later (gaps). It therefore begins to
work again only when requests begin, and rests only when its price is known.
"""

import math

from histospec.client.vllm.choice import Promise, looks_of
from histospec.client.vllm.choice.clock import WATCHED
from histospec.client.vllm.choice.gains import STARTING, LevelGains
from histospec.client.vllm.choice.learned import MODERATE
from histospec.client.vllm.choice.modes import BARE, REST, Limits, Way
from histospec.client.vllm.choice.outcomes import Outcomes
from histospec.client.vllm.choice.pauses import Pauses
from histospec.client.vllm.choice.worth import Yields
from histospec.protocol.costs import HOPELESS_VERIFY_COST

WEIGH = 8  # steps between two comparisons of the ways
FEWEST = 4  # steady steps in a way before it is compared
FIRST = 24  # steady steps with a size of the batch before another way is tried
ENOUGH = 1.0  # sum of the advantages of a way, in tokens, at which the engine changes to it
OPTIMISM = 1.0  # a way is tried if it pays at a price this many standard deviations lower
LOOK = 32  # sequences times steps of a trial,
LOOK_STEPS = 3, 8  # which takes from 3 to 8 steps: a longer gap would spoil the drafter's later tokens
LASTED = 256  # steps after which it was no mistake to have changed to a way
BETTER = 1.25  # the server's drafts are tried at once if they promise this many times the tokens of the last failure
UNSTEADY = 128  # steps of which none could be compared, after which the server is asked
PROMISING = 1.5  # if its drafts promise so many tokens
OVERDUE = 4  # a drafter is tried in the midst of requests if it has rested this many times as long as it must
READ = 0.9  # share of the requests that the drafter must have read, for its yield to count
WAIT = 32  # steps in which that share must rise until then
LONGER = 0.4
"""Share of the cost with which to ask the server for drafts that are compared with the model's. Tokens that the model
drafts, too, are more likely than the server knows, so longer drafts pay. The comparison cuts tokens that do not pay."""
VARY = 4, 64  # steps between two changes of the number of tokens: while a price is unknown, and later
CHEAPER = 0.25  # share of the price of verifying a token in a step whose drafts are longer, to learn that price


class Steering:
    """Decides, after each step, who drafts next, and how many tokens the drafter makes. Not thread-safe."""

    looks_next = False

    def __init__(self, outcomes: Outcomes, gains: LevelGains, limits: Limits, verify_cost: float | None = None) -> None:
        """Takes what the drafter can do, and what it yields: alone (`outcomes`), and with the server (`gains`).

        `verify_cost`: the cost that the user has set, at which the server is always asked, or never; None: learn it.
        """
        asked = (False, True) if verify_cost is None else (verify_cost < HOPELESS_VERIFY_COST,)
        ways = [Way(server, drafter) for drafter in limits.runs for server in asked]  # the simplest first
        self._limits, self._fixed, self._ways = limits, verify_cost, frozenset(ways)
        self._yields = Yields(outcomes, gains, ways, verify_cost)
        self._pauses = Pauses(ways)
        self._evidence = dict.fromkeys(ways, 0.0)
        self._way = Way(asked[0], limits.runs[-1])
        self._back: Way | None = None  # the way in use before a trial; None: there is no trial
        self._tried_at = 0  # the step in which the newest trial began
        self._changed = False  # whether the engine changed to the way in use
        self._settled = 0  # steady steps in it
        self._waited = 0  # steps in it in which the drafter had not read enough of the requests
        self._read_before = 0.0  # the share that it had read, WAIT such steps ago
        self._number = 0
        self._weighed = 0  # the step of the last comparison
        self._was: Way | None = None  # who drafted in the newest step
        self._asked = self._way.server  # whether the server was asked for its drafts
        self._unsteady = 0  # steps since the last one that could be compared
        self._refused = math.inf  # tokens with the server when it last did not pay
        self.read = 1.0
        """Share of the running requests that the drafter has read; the caller sets it."""

    # ---- what to do next --------------------------------------------------------------------------------------------

    @property
    def value(self) -> float:
        """The cost of a drafted token at the batch size of the newest step; DEFAULT_VERIFY_COST while unknown."""
        return self._yields.prices.cost if self._fixed is None else self._fixed

    @property
    def told(self) -> float:
        """The cost to report to the server, for its metrics; while it is not asked, one at which none is drafted."""
        asks = self._way.server or self._fixed is not None
        return self.value if asks else max(self.value, HOPELESS_VERIFY_COST)

    @property
    def learned(self) -> bool:
        """Whether `value` was measured."""
        return self._fixed is None and self._yields.prices.verify_cost_known

    @property
    def moderate(self) -> float:
        """The cost to ask with for drafts that may not pay."""
        return min(self.value, MODERATE)

    @property
    def curious(self) -> bool:
        """Whether to ask for drafts now and then that no step verifies, for `promised`."""
        return self._fixed is None and not self._way.server

    @property
    def price(self) -> float:
        """The price of verifying a token, in tokens that the time would yield otherwise.

        Sometimes it is lower, so that longer drafts show what they cost.
        """
        vary = self._number % VARY[self._yields.prices.verify_cost_sure] == 0
        return self._yields.token_price * (CHEAPER if vary else 1.0)

    def next(self) -> float | None:
        """Returns the cost to ask the server for the next drafts with; None: ask for none."""
        self._asked = self._way.server
        if not self._asked:
            return None
        cost = self.moderate if self._back is not None else self.value
        return cost * LONGER if self._way.drafter else cost

    def number(self, sequences: int, prompts: bool) -> int:
        """Returns how many tokens the drafter makes in the step that begins, or REST.

        Args:
            sequences: how many sequences the step computes, at least 1.
            prompts: whether it computes prompts.
        """
        self._yields.move(sequences)
        limits, prices = self._limits, self._yields.prices
        if prompts and not self._way.drafter:
            self._begin_requests()
        if not self._way.drafter:
            return REST
        if not limits.may_vary:
            return limits.longest
        if limits.fixed is not None:
            return limits.fixed
        turn, rest = divmod(self._number, VARY[prices.drafter_known])
        vary = (1 if turn % 2 else -1) if rest == 0 else 0
        tokens = self._yields.tokens[self._way.server] if prices.plain_known else STARTING
        return max(1, min(tokens + vary, limits.longest))

    def passes(self) -> bool:
        """Counts a step if it teaches nothing: then the caller leaves out `observe` and `next`, and asks for no drafts.

        Call it only for a step that verified no drafts, and in which the drafter did not run.
        """
        number = self._number + 1
        quiet = self._way == self._was == BARE and self._back is None and self._settled >= FEWEST
        if not quiet or number % WATCHED in (0, WATCHED - 1):
            return False
        self._number = number
        self._was = None  # the clock is not read, so the next step teaches nothing
        return True

    # ---- what it learns from ----------------------------------------------------------------------------------------

    def promised(self, promise: Promise) -> None:
        """Takes what drafts of the server promise that no step verifies, asked for at the cost `moderate`."""
        if self._yields.promised(promise) >= BETTER * self._refused:
            self._pauses.forgive_server()

    def observe(
        self,
        seconds: float,
        sequences: int,
        tokens: int,
        alone: bool = False,
        generated: int | None = None,
        model_tokens: int | None = None,
    ) -> None:
        """Learns from one step, and decides how to draft next.

        `model_tokens`: how many tokens the drafter made for each sequence; None: it did not run. For the others, see
        LearnedCost.
        """
        self._number += 1
        before, self._was = self._was, Way(self._asked, model_tokens is not None)
        if sequences < 1:
            return
        self._yields.move(sequences)
        if not 0 < seconds < math.inf:
            self._wake()
            return
        if alone or before != self._was:
            self._unsteady += 1
            if self._unsteady >= UNSTEADY and self._back is None:
                self._trust_promises()
            return
        self._unsteady = 0
        looks = looks_of(self._asked, (tokens - sequences) / sequences, model_tokens)
        self._yields.prices.observe(self._number, seconds, sequences, looks)
        if generated is None or self._was != self._way:
            return
        if self._way.drafter and self.read < READ and self._without in self._ways:
            self._wait()
            return
        self._yields.add(self._way, sequences, generated, looks)
        self._settled += 1
        if self._back is None:
            self._compare()
        elif self._settled >= min(max(LOOK_STEPS[0], LOOK / sequences), LOOK_STEPS[1]):
            self._end_trial(self._back, self._settled * sequences)

    # ---- decisions --------------------------------------------------------------------------------------------------

    @property
    def _with(self) -> Way:
        return Way(self._way.server, True)

    @property
    def _without(self) -> Way:
        return Way(self._way.server, False)

    def _compare(self) -> None:
        """Changes to another way, or begins to try one, if that promises to pay."""
        if self._settled < FEWEST or self._number - self._weighed < WEIGH:
            return
        now = self._weighed = self._number
        worth = self._yields.worth(self._way)
        least = worth.pop(self._way).tokens + self._yields.margin(self._way)
        for way, other in worth.items():
            self._evidence[way] = min(max(0.0, self._evidence[way] + other.tokens - least), ENOUGH)
        at_best = {w: o.tokens + OPTIMISM * o.doubt for w, o in worth.items() if self._may_change(w)}
        found = [w for w in at_best if self._evidence[w] >= ENOUGH and self._pauses.may_take(w, now)]
        tried = [w for w in at_best if at_best[w] > least and self._pauses.may_try(w, now)]
        prices = self._yields.prices
        if found:
            self._change(max(found, key=at_best.__getitem__))
        elif prices.steps < FIRST:
            return  # the price of the way in use, with this size of the batch, has to be known first
        elif BARE in worth and not prices.plain_known and self._pauses.may_try(BARE, now):
            self._try(BARE)  # its time is the unit of all prices
        elif tried:
            self._try(tried[0])  # the simplest way first, whose price tells more of the others
        elif self._with in worth and self._pauses.rested(now, OVERDUE):
            self._try(self._with)

    def _trust_promises(self) -> None:
        """Asks the server if its drafts promise enough: no step can be compared, for example if each reads prompts."""
        with_server, promise = Way(True, self._way.drafter), self._yields.promise
        if not self._way.server and with_server in self._ways and promise is not None and promise.tokens >= PROMISING:
            self._change(with_server)

    def _may_change(self, way: Way) -> bool:
        """Returns whether the engine may change to a way in the midst of requests.

        The drafter cannot begin, because it has not read them. It may rest once its price is known, and what it adds to
        the server's drafts.
        """
        if way.drafter or not self._way.drafter:
            return way.drafter == self._way.drafter
        return self._yields.prices.plain_known and (self._yields.known or not way.server)

    def _begin_requests(self) -> None:
        """Lets the drafter work again if that pays or is to be tried, or ends a trial without it: requests begin."""
        if self._back is not None and self._back.drafter:
            self._pauses.cut_short(self._way, self._number)
            self._return(self._back)
        elif self._back is None and self.read >= READ and self._with in self._ways:
            if self._yields.added(self._way.server) > 0 and self._pauses.may_take(self._with, self._number):
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
        if not rises or (check and self._yields.added(self._way.server) <= 0):
            back, self._back = self._back, None
            self._changed = self._changed or back is not None
            self._change(self._without if back is None or back.drafter else back)

    def _try(self, way: Way) -> None:
        if way.drafter and not self._way.drafter:
            self._yields.fade()
        self._back, self._tried_at = self._way, self._number + 1
        self._yields.clear(way)
        self._enter(way)

    def _end_trial(self, back: Way, samples: int) -> None:
        """Stays with the way that was tried if it is faster than the one before."""
        if self._yields.is_faster(self._way, back, samples):
            self._back, self._changed = None, True
            self._pauses.left(back, self._number, self._rests(back), mistaken=False)
        else:
            way = self._way
            self._return(back)
            self._pauses.tried(way, self._number, self._rests(way))
            self._refuse(way)

    def _return(self, back: Way) -> None:
        self._back = None
        self._enter(back)
        self._settled = FEWEST

    def _change(self, way: Way) -> None:
        left, mistaken = self._way, self._changed and self._settled < LASTED
        self._yields.clear(way)
        self._enter(way)
        self._changed = True
        self._pauses.left(left, self._number, self._rests(left), mistaken)
        if mistaken:
            self._refuse(left)

    def _enter(self, way: Way) -> None:
        self._way, self._settled, self._waited, self._read_before = way, 0, 0, self.read
        self._evidence = dict.fromkeys(self._ways, 0.0)

    def _rests(self, left: Way) -> bool:
        return left.drafter and not self._way.drafter

    def _refuse(self, way: Way) -> None:
        if way.server:
            self._refused = self._yields.generated(way)

    def _wake(self) -> None:
        """Notes that the engine was idle: other requests follow, perhaps with more history."""
        if self._back is not None and self._tried_at < self._number:
            self._return(self._back)
        self._settled = 0
        self._evidence = dict.fromkeys(self._ways, 0.0)
        self._yields.wake(self._way)
