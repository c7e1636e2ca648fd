"""Estimates what each way of drafting is worth: its tokens, less the time of its steps.

The unit is a token per request and step. A way that yields g tokens in steps of price p is worth g - s * p, where s is
the speed: what the way in use yields for the price of a step without drafts. The prices come from the times of the
steps (choice/prices). The yield of the way in use is measured. That of the others is expected: the server's from the
probabilities of its drafts, the drafter's from what it yielded alone (outcomes), or with the server (gains).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from histospec.client.vllm.choice import Promise, Rate, StepPrices, looks_of
from histospec.client.vllm.choice.gains import STARTING, Best, LevelGains, best
from histospec.client.vllm.choice.modes import BARE, BOTH, MODEL, SERVER, Way
from histospec.client.vllm.choice.outcomes import Outcomes
from histospec.client.vllm.choice.prices import NOTHING, Looks, half_octaves

MEMORY = 48.0  # steps over which a yield is measured
SPREAD = 1.0  # standard deviation of the tokens that a request gets in a step
MARGIN = 0.02  # share of the yield by which another way must be better


class Worth(NamedTuple):
    """What a way is worth.

    Attributes:
        tokens: its worth.
        doubt: standard deviation of the difference to the way in use, as far as it comes from the prices.
    """

    tokens: float
    doubt: float


class Yields:
    """The yields and prices of the ways. Not thread-safe."""

    def __init__(self, outcomes: Outcomes, gains: LevelGains, ways: Iterable[Way], token: float | None) -> None:
        """`ways`: those to choose from. `token`: the price of a drafted token, if it is given; None: learn it."""
        self._outcomes, self._gains = outcomes, gains
        self._rates = {way: Rate(MEMORY) for way in ways}
        self._token = token
        self._sizes: dict[int, StepPrices] = {}  # by the logarithm of the batch, in half octaves
        self.prices = StepPrices(token=token)
        """The prices of steps with the present size of the batch."""
        self.promise: Promise | None = None
        """Mean of the latest ones since the engine was idle."""
        self.tokens = dict.fromkeys((False, True), STARTING)
        """How many tokens the drafter should make; by whether the server is asked."""
        self.known = False
        """Whether it is known what the drafter adds to the server's drafts."""
        self._speed = 1.0

    @property
    def token_price(self) -> float:
        """The price of verifying a token."""
        return self._speed * self.prices.token

    def move(self, sequences: int) -> None:
        """Takes the prices of a size of the batch; at first, those of the nearest known one."""
        size = half_octaves(sequences)
        if size not in self._sizes:
            nearest = min(self._sizes, key=lambda other: abs(other - size), default=None)
            self._sizes[size] = (
                self.prices if nearest is None else StepPrices(self._sizes[nearest], abs(nearest - size), self._token)
            )
        self.prices = self._sizes[size]

    def add(self, way: Way, sequences: int, generated: int, looks: Looks) -> None:
        """Adds the tokens of a step in a way."""
        self._rates[way].add(sequences, generated, looks)

    def generated(self, way: Way) -> float:
        """Returns the measured tokens of a way per request and step; infinite if there were no steps."""
        rate = self._rates[way]
        return rate.generated if rate.steps else math.inf

    def clear(self, way: Way) -> None:
        """Lets the yield of a way be measured anew."""
        self._rates[way].clear()

    def promised(self, promise: Promise) -> float:
        """Takes what drafts of the server promise that no step verifies. Returns the mean tokens of the latest ones."""
        self.promise = promise.after(self.promise)
        return self.promise.tokens

    def fade(self) -> None:
        """Lets old results of the drafter count less: it may have become better."""
        self._outcomes.fade()
        self._gains.fade()

    def wake(self, way: Way) -> None:
        """Notes that the engine was idle: other requests follow, perhaps with more history."""
        self.promise = None
        if not way.server:
            self._gains.forget_levels()
        for other in self._rates:
            if other.server:
                self.clear(other)

    def worth(self, way: Way) -> dict[Way, Worth]:
        """Returns what each way is worth; `way`: the one in use. Computes the speed and the drafter's tokens anew."""
        prices, rate = self.prices, self._rates[way]
        speed = self._set_speed(rate)
        alone, added = self._best(server=False), self._best(server=True)
        here = rate.generated - speed * prices.price(rate.looks)
        model = 1 - speed * (1 + prices.verify) + alone.net
        most = math.inf  # of both: the server adds at most the tokens of its own drafts
        if way.server:
            server, drafted = here - added.net * way.drafter, rate.looks[3]
        elif self.promise is not None:
            server, drafted = self.promise.tokens, self.promise.drafted
            most = (here if way.drafter else model) + server - 1 - speed * prices.ask
            server -= speed * prices.price(looks_of(True, drafted, None))
        else:
            server, drafted = -math.inf, 0.0
        self.known = added.known
        both = min(most, server + (added.net if added.known else max(alone.net, 0.0)))
        found = {
            BARE: (1 - speed, NOTHING),
            SERVER: (server, looks_of(True, drafted, None)),
            MODEL: (model, looks_of(False, alone.tokens, alone.tokens)),
            BOTH: (both, looks_of(True, drafted, added.tokens)),
        }
        found[way] = here, rate.looks
        return {
            other: Worth(tokens, speed * prices.doubt(looks, rate.looks))
            for other, (tokens, looks) in found.items()
            if other in self._rates
        }

    def margin(self, way: Way) -> float:
        """Returns by how many tokens another way must be better."""
        return MARGIN * self._rates[way].generated

    def added(self, server: bool) -> float:
        """Returns what the drafter adds to a request that it has read, less its price.

        `server`: in addition to the server's drafts; otherwise to none.
        """
        found = self._best(server)
        return found.net - (0.0 if server else self._speed * self.prices.verify)

    def is_faster(self, way: Way, than: Way, samples: int) -> bool:
        """Returns whether a way that was tried is faster than the one before, by more than may be noise.

        If the former way has no steps since the engine was idle, what the drafter adds decides.

        `samples`: steps of requests in which the former was tried.
        """
        prices, tried, before = self.prices, self._rates[way], self._rates[than]
        if not before.steps:  # the trial began with its requests
            return self.added(way.server) > 0
        speed = self._set_speed(before)
        gain = tried.generated - before.generated
        gain -= speed * (prices.price(tried.looks) - prices.price(before.looks))
        noise = math.hypot(SPREAD / math.sqrt(samples), speed * prices.doubt(tried.looks, before.looks))
        return gain > noise + self.margin(than)

    def _set_speed(self, rate: Rate) -> float:
        self._speed = max(
            1.0, rate.generated / self.prices.price(rate.looks)
        )  # 1, as without drafts, is always to be had
        return self._speed

    def _best(self, server: bool) -> Best:
        """Returns the best number of the drafter's tokens, in addition to the server's or alone."""
        prices, speed = self.prices, self._speed
        first, token = speed * prices.first_pass, speed * prices.model_token
        alone = self._outcomes.alone(self.token_price)
        found = self._gains.best(first, token) if server else best(alone, first, token)
        self.tokens[server] = found.tokens
        return found
