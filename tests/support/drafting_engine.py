"""An engine that does not exist, whose model has a drafter of its own: its prices and yields are known."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from histospec.client.vllm.choice import Promise
from histospec.client.vllm.choice.chooser import Steering
from histospec.client.vllm.choice.drafts import Gains
from histospec.client.vllm.choice.gains import LevelGains
from histospec.client.vllm.choice.modes import BARE, REST, Limits, Way
from histospec.client.vllm.choice.outcomes import Outcomes
from histospec.protocol.costs import NOTHING_PAYS

LENGTH = 140  # tokens of a response, on average
SURE = 0.9  # probability that a token of the server is right
LEVEL = 6  # of such a token


class Prices(NamedTuple):
    """The prices of an engine's steps, in steps without drafts. By default, those of a tiny model on a CPU.

    Attributes:
        plain: seconds of a step without drafts.
        noise: deviation of a step's time.
        cold: how many times longer the first step takes after another kind of step.
    """

    ask: float = 0.38
    verify: float = 0.17
    token: float = 0.08
    first: float = 0.25
    made: float = 0.28
    plain: float = 0.003
    noise: float = 0.06
    cold: float = 1.5


CPU = Prices()
GPU = Prices(ask=0.01, verify=0.02, token=0.01, first=0.03, made=0.03, plain=0.03)
SATURATED = Prices(ask=0.05, verify=0.05, token=0.9, first=0.3, made=0.2)


class Text(NamedTuple):
    """How predictable the text is.

    Attributes:
        known: share of the steps of a request in which the server has a draft.
        length: tokens of such a draft.
        right: probability that a token of the model's drafter is right if those before it are.
    """

    known: float
    length: int = 6
    right: float = 0.8

    @property
    def promise(self) -> Promise:
        """What the server's drafts promise."""
        each = sum(SURE**i for i in range(1, self.length + 1))
        return Promise(1 + self.known * each, self.known * self.length)


class DraftingEngine:
    """Decodes requests side by side, and counts the true time."""

    def __init__(
        self, prices: Prices, text: Text, limits: Limits, cost: float | None = None, sequences: int = 8, seed: int = 0
    ) -> None:
        """`cost`: as `verify_cost` of Steering."""
        self.prices, self.text, self.sequences = prices, text, sequences
        self.outcomes, self.gains = Outcomes(limits.longest), LevelGains(limits.longest)
        self.steering = Steering(self.outcomes, self.gains, limits, cost)
        self.seconds = self.tokens = 0.0
        self.ways: list[Way] = []
        """Of each step."""
        self.numbers: list[int] = []
        """Tokens that the drafter made in each step, or REST."""
        self._told = random.Random(seed)
        self._left: list[float] = []  # tokens that each request will still get
        self._unread: list[bool] = []  # whether the drafter has not read its prompt
        self._made = 0  # tokens of the model's drafts that the next step verifies
        self._kind = BARE
        self._idle = True
        self.prompts = False
        """Whether each step also reads a prompt."""
        self._until_probe = 1  # steps until a probe's drafts arrive

    def idle(self) -> None:
        """Ends all requests; others begin."""
        self._left, self._unread, self._idle, self._until_probe = [], [], True, 1

    def run(self, steps: int) -> float:
        """Returns seconds per token of so many steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step()
        return (self.seconds - seconds) / (self.tokens - tokens)

    def share(self, way: Way, last: int = 300) -> float:
        """Returns the share of the last steps in a way."""
        return self.ways[-last:].count(way) / last

    def step(self) -> None:
        """Takes a step."""
        told, steering = self._told, self.steering
        asked = steering.next() is not None
        new = self.sequences - len(self._left)
        self._left += [LENGTH * told.uniform(0.5, 1.5) for _ in range(new)]
        self._unread += [False] * new
        steering.read = 1 - sum(self._unread) / self.sequences
        number = steering.number(self.sequences, new > 0)
        runs = number != REST
        if not runs and new:
            self._unread[-new:] = [True] * new
        drafted, accepted = self._verify(asked)
        self._made = number if runs else 0
        prices, kind = self.prices, Way(asked, runs)
        price = 1 + prices.ask * asked + prices.verify * (drafted > 0) + prices.token * drafted / self.sequences
        price += prices.first * runs + prices.made * max(number, 0)
        measured = prices.plain * price * told.lognormvariate(0, prices.noise)
        measured *= prices.cold if kind != self._kind else 1.0
        measured, self._idle = (math.inf if self._idle else measured), False
        self.seconds += prices.plain * price
        self.tokens += self.sequences + accepted
        quiet = not (asked or runs or drafted) and math.isfinite(measured)
        if not (quiet and steering.passes()):
            made = number if runs else None
            generated = self.sequences + accepted
            alone = new > 0 or self.prompts
            steering.observe(measured, self.sequences, self.sequences + drafted, alone, generated, made)
        kept = [i for i, left in enumerate(self._left) if left > 0]
        self._left, self._unread = [self._left[i] for i in kept], [self._unread[i] for i in kept]
        self._kind = kind
        self.ways.append(kind)
        self.numbers.append(number)

    def _verify(self, asked: bool) -> tuple[int, int]:
        """Verifies the drafts of each request. Returns how many tokens were drafted, and how many accepted."""
        told, text = self._told, self.text
        known = [told.random() < text.known for _ in self._left]
        worth = self.outcomes.alone(self.steering.price)
        depth = int(worth.argmax()) + 1 if worth.max() > 0 else 0
        rows = []
        for i, has_history in enumerate(known):
            server = has_history and asked
            model = 0 if self._unread[i] else self._made if asked else min(self._made, depth)
            length, chance = (text.length, SURE) if server else (model, text.right)
            right = next((j for j in range(length) if told.random() >= chance), length)
            self._left[i] -= 1 + right
            rows.append((length, right))
        if self._made and not asked:
            verified, accepted = np.array(rows, np.int64).T
            self.outcomes.learn_alone(verified, accepted, np.zeros(len(rows), np.int64))
        self._compare(known, asked)
        return sum(length for length, _ in rows), sum(right for _, right in rows)

    def _compare(self, known: Sequence[bool], asked: bool) -> None:
        """Learns what the drafter adds where both draft. Where the server is silent, takes what its drafts promise."""
        level = np.where(known, LEVEL, 0)
        if asked:
            self.gains.saw_levels(level)
            if self._made:
                each = np.cumsum(self.text.right ** np.arange(1, self._made + 1) - self.steering.price)
                gain = np.maximum(each, 0.0)[None, :] * (level == 0)[:, None]
                self.gains.saw(Gains(level, gain), ~np.array(self._unread))
        elif self._until_probe == 0:
            self.steering.promised(self.text.promise)
            self.gains.saw_levels(level)
        self._until_probe = (self._until_probe - 1) % 100


def best(prices: Prices, text: Text) -> float:
    """Returns seconds per token of the best way of drafting, with the best number of tokens, without any trial."""
    found = [prices.plain / 8]
    for cost, number in itertools.product((0.05, NOTHING_PAYS + 0.1), range(7)):
        engine = DraftingEngine(prices, text, Limits(16, number), cost)
        engine.run(100)
        found.append(engine.run(300))
    return min(found)
