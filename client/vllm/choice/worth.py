"""Estimates what each mode of drafting is worth: its tokens, less the time of its steps.

The unit is a token per request and step. A mode that yields g tokens in steps of price p is worth g - s * p, where s is
the speed: what the mode in use yields for the price of a step without drafts. The prices come from the times of the
steps. The yield of the mode in use is measured. That of the others is expected: the server's from the probabilities of
its drafts, the drafter's from what it yielded alone (`drafts.Outcomes`), or with the server (`LevelGains`).
"""

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.vllm.choice.drafts import FADE, SILENT, SIZE, Gains, Outcomes
from histospec.client.vllm.choice.modes import BOTH, DRAFTER, NOTHING, SERVER, Mode
from histospec.client.vllm.choice.prices import StepPrices, StepWork, half_octaves, work_of

if TYPE_CHECKING:
    from histospec.client import Draft

RATE_STEPS = 48.0  # steps over which a yield is measured,
RATE_REQUESTS = 1024.0  # or fewer, if they have more requests together
PROMISES = 4  # over which the mean of promises is taken
TOKEN_SPREAD = 1.0  # standard deviation of the tokens that a request gets in a step
MARGIN = 0.02  # share of the yield by which another mode must be better

STARTING = 3  # tokens that the drafter makes until more is known
GAIN_MEMORY = 2048.0  # requests after which old results of a level count half
LATELY = 0.97  # weight of the older steps in the present levels, which are those of about thirty steps
ENOUGH_RESULTS = 32.0  # from which on a gain is known
LESS = 0.8  # gain of a token that was never tried, relative to that of the token before


class Rate:
    """Means over the latest steps of one mode: their tokens, and their work."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all steps."""
        self.steps = 0
        self._weight = self._generated = 0.0
        self._work = StepWork(0.0)

    def add(self, sequences: int, generated: int, work: StepWork) -> None:
        """Adds a step: how many sequences it computed, the tokens that it yielded, and its work."""
        kept = max(0.0, 1 - max(1 / RATE_STEPS, sequences / RATE_REQUESTS))
        self._work = StepWork(*(sequences * new + kept * old for new, old in zip(work, self._work, strict=True)))
        self._weight = kept * self._weight + sequences
        self._generated = kept * self._generated + generated
        self.steps += 1

    @property
    def generated(self) -> float:
        """Tokens per sequence and step. There must be a step."""
        return self._generated / self._weight

    @property
    def work(self) -> StepWork:
        """The mean work of a step. There must be one."""
        return StepWork(*(each / self._weight for each in self._work))


class Promise(NamedTuple):
    """What the server's drafts promise by its own estimate; means over the requests of a batch.

    Attributes:
        tokens: what a step would yield that verifies the drafts: one token, and those accepted.
        drafted: tokens of a draft.
    """

    tokens: float
    drafted: float


def promise_of(drafts: "Collection[Draft]") -> Promise:
    """Returns what the drafts of a batch promise; it must have a request.

    The server estimates for each token the probability that it is accepted if all tokens before it are. So a draft
    yields the sum of the products of its first 1, 2, ... probabilities.
    """
    accepted = sum(float(draft.probs.cumprod().sum()) for draft in drafts)
    return Promise(1 + accepted / len(drafts), sum(map(len, drafts)) / len(drafts))


class Best(NamedTuple):
    """The number of the drafter's tokens with the best net gain.

    Attributes:
        tokens: the number.
        net: expected tokens that it adds for each request, less their verification and the price of drafting.
        known: whether there are results.
    """

    tokens: int
    net: float
    known: bool = True


def best(gain: NDArray[np.float64], first: float, token: float) -> Best:
    """Returns the best number of tokens for the price of the drafter, in tokens per request.

    Args:
        gain: float[K], the gain of the first 1, 2, … tokens.
        first: the price of the drafter's first pass.
        token: the price of each token that it makes.
    """
    net = gain - first - token * np.arange(1, len(gain) + 1)
    at = int(net.argmax())
    return Best(at + 1, float(net[at]))


class LevelGains:
    """What the drafter's first 1, 2, … tokens add to the server's drafts. Not thread-safe.

    The gain depends on what the server knows of the same requests. So it is learned by level: the server's estimate of
    its first token.
    """

    def __init__(self, longest: int) -> None:
        """`longest`: the most tokens that the drafter can make."""
        self._longest = longest
        self._gain = np.zeros((SIZE, longest))
        self._seen = np.zeros((SIZE, longest))
        self.forget_levels()

    def saw(self, gains: Gains, covered: NDArray[np.bool_]) -> None:
        """Learns from the gain of a step's drafts. `covered`: bool[B], the requests whose text the drafter has read."""
        width = gains.gain.shape[1]
        level, gain = gains.level[covered], gains.gain[covered]
        if not width or not len(level):
            return
        self._seen[:, :width] *= 0.5 ** (len(level) / GAIN_MEMORY)
        seen = np.bincount(level, minlength=SIZE).astype(np.float64)
        self._seen[:, :width] += seen[:, None]
        total = np.zeros((SIZE, width))
        np.add.at(total, level, gain)
        at = seen > 0
        means = self._gain[at, :width]
        self._gain[at, :width] += (total[at] - seen[at, None] * means) / self._seen[at, :width]

    def saw_levels(self, level: NDArray[np.int64]) -> None:
        """Takes the level of the server's first token for each request, int[B], of a step that asked the server."""
        if len(level):
            self._levels += (1 - LATELY) * (np.bincount(level, minlength=SIZE) / len(level) - self._levels)
            self._levels_seen += (1 - LATELY) * (1 - self._levels_seen)

    def fade(self) -> None:
        """Lets old results count little."""
        self._seen *= FADE

    def forget_levels(self) -> None:
        """Forgets at which levels the requests are: other requests follow."""
        self._levels = np.zeros(SIZE)  # share of the requests at each level: decaying sums,
        self._levels_seen = 0.0  # and their total

    def best(self, first: float, token: float) -> Best:
        """Returns the best number of tokens that the drafter adds to the server's; for the prices, see `best`."""
        levels = self._levels / self._levels_seen if self._levels_seen else np.eye(SIZE)[SILENT]
        gain = levels @ self._gain
        depth = int((levels @ self._seen > 1).sum())  # the longest number with results
        if not depth:
            tokens = min(STARTING, self._longest)
            return Best(tokens, -first - token * tokens, known=False)
        gain = gain[:depth]
        if depth < self._longest:
            last = gain[-1] - (gain[-2] if depth > 1 else 0.0)
            gain = np.append(gain, gain[-1] + LESS * last)
        return best(gain, first, token)._replace(known=bool(levels @ self._seen[:, 0] > ENOUGH_RESULTS))


class Estimate(NamedTuple):
    """What a mode is worth.

    Attributes:
        tokens: its worth.
        doubt: standard deviation of the difference to the mode in use, as far as it comes from the prices.
    """

    tokens: float
    doubt: float


class Worth:
    """The yields and prices of the modes. Not thread-safe."""

    def __init__(
        self, modes: Iterable[Mode], token: float | None, drafter: tuple[Outcomes, LevelGains] | None = None
    ) -> None:
        """Takes the modes to choose from.

        Args:
            modes: these modes.
            token: the price of a drafted token, if it is given; None: learn it.
            drafter: what the model's own drafter yields, alone and with the server; None: the model has none.
        """
        self._drafter = drafter
        self.rates = {mode: Rate() for mode in modes}
        """The measured yield of each mode."""
        self._token = token
        self._sizes: dict[int, StepPrices] = {}
        self.size = 0
        """The present size of the batch, as its logarithm in half octaves."""
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
        return self._speed * self.prices.each.token

    def move(self, sequences: int) -> None:
        """Takes the prices of a size of the batch; at first, those of the nearest known one."""
        self.size = size = half_octaves(sequences)
        if size not in self._sizes:
            nearest = min(self._sizes, key=lambda other: abs(other - size), default=None)
            self._sizes[size] = (
                self.prices if nearest is None else StepPrices(self._sizes[nearest], abs(nearest - size), self._token)
            )
        self.prices = self._sizes[size]

    def promised(self, promise: Promise) -> float:
        """Takes what drafts of the server promise that no step verifies. Returns the mean tokens of the latest ones."""
        before = promise if self.promise is None else self.promise
        self.promise = Promise(*(old + (new - old) / PROMISES for old, new in zip(before, promise, strict=True)))
        return self.promise.tokens

    def fade(self) -> None:
        """Lets old results of the drafter count less: it may have become better."""
        for results in self._drafter or ():
            results.fade()

    def wake(self, mode: Mode) -> None:
        """Notes that the engine was idle: other requests follow, perhaps with more history."""
        self.promise = None
        if self._drafter is not None and not mode.server:
            self._drafter[1].forget_levels()
        for other, rate in self.rates.items():
            if other.server:
                rate.clear()

    def of_modes(self, mode: Mode) -> dict[Mode, Estimate]:
        """Returns what each mode is worth; `mode`: the one in use. Computes the speed and the drafter's tokens anew."""
        prices, rate = self.prices, self.rates[mode]
        speed, each = self._set_speed(rate), prices.each
        alone, added = self._best(server=False), self._best(server=True)
        here = rate.generated - speed * prices.price(rate.work)
        drafter = 1 - speed * (1 + each.verify) + alone.net
        most = math.inf  # of both: the server adds at most the tokens of its own drafts
        if mode.server:
            server, drafted = here - added.net * mode.drafter, rate.work.token
        elif self.promise is not None:
            server, drafted = self.promise.tokens, self.promise.drafted
            most = (here if mode.drafter else drafter) + server - 1 - speed * each.ask
            server -= speed * prices.price(work_of(True, drafted, None))
        else:
            server, drafted = -math.inf, 0.0
        self.known = added.known
        both = min(most, server + (added.net if added.known else max(alone.net, 0.0)))
        found = {
            NOTHING: (1 - speed, StepWork()),
            SERVER: (server, work_of(True, drafted, None)),
            DRAFTER: (drafter, work_of(False, alone.tokens, alone.tokens)),
            BOTH: (both, work_of(True, drafted, added.tokens)),
        }
        found[mode] = here, rate.work
        return {
            other: Estimate(tokens, speed * prices.doubt(work, rate.work))
            for other, (tokens, work) in found.items()
            if other in self.rates
        }

    def margin(self, mode: Mode) -> float:
        """Returns by how many tokens another mode must be better."""
        return MARGIN * self.rates[mode].generated

    def added(self, server: bool) -> float:
        """Returns what the drafter adds to a request that it has read, less its price.

        `server`: in addition to the server's drafts; otherwise to none.
        """
        return self._best(server).net - (0.0 if server else self._speed * self.prices.each.verify)

    def is_faster(self, mode: Mode, than: Mode, samples: int) -> bool:
        """Returns whether a mode that was tried is faster than the one before.

        If the model has a drafter, it must be faster by more than may be noise, because a mistake leaves gaps in what
        the drafter has read. If only the server drafts, it may be slower by that: further steps soon tell.
        If the former mode has no steps since the engine was idle, what the drafter adds decides.

        `samples`: steps of requests in which the former was tried.
        """
        prices, tried, before = self.prices, self.rates[mode], self.rates[than]
        if not before.steps:  # the trial began with its requests
            return self.added(mode.server) > 0
        speed = self._set_speed(before)
        gain = tried.generated - before.generated
        gain -= speed * (prices.price(tried.work) - prices.price(before.work))
        noise = math.hypot(TOKEN_SPREAD / math.sqrt(samples), speed * prices.doubt(tried.work, before.work))
        if self._drafter is None:
            noise *= -1 if mode.server else 0
        return gain > self.margin(than) + noise

    def _set_speed(self, rate: Rate) -> float:
        # At least 1: steps without drafts are always to be had.
        self._speed = max(1.0, rate.generated / self.prices.price(rate.work))
        return self._speed

    def _best(self, server: bool) -> Best:
        """Returns the best number of the drafter's tokens, in addition to the server's or alone."""
        if self._drafter is None:
            return Best(0, 0.0)
        outcomes, gains = self._drafter
        each, speed = self.prices.each, self._speed
        first, token = speed * each.first_pass, speed * each.model_token
        found = gains.best(first, token) if server else best(outcomes.alone(self.token_price), first, token)
        self.tokens[server] = found.tokens
        return found
