"""Simulated engines: the prices of their steps, and how predictable their text is, are known."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest

from histospec.client.vllm.choice.chooser import ModeChooser
from histospec.client.vllm.choice.drafts import Gains, Outcomes
from histospec.client.vllm.choice.modes import NO_DRAFTER, NOTHING, REST, Limits, Mode
from histospec.client.vllm.choice.worth import LevelGains, Promise
from histospec.protocol.costs import NOTHING_PAYS, STARTING_SPEED_UP, speedup

LONGEST = 16  # tokens of a draft
LENGTH = 140  # tokens of a response, on average, where a drafter reads prompts
PROBED = 100  # while the server is not asked, every 100th step asks for drafts that no step verifies
HOPEFUL = 1.5  # after 100 steps, a mode that takes so many times as long as the best one will not be the best
SURE = 0.9  # probability that a token of the server is right, where it knows the text
LEVEL = 6  # of such a token
# `make test` simulates with the first, `make test-long` with the others.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]

Noise = Callable[[random.Random, float], float]
"""(random numbers, true seconds) -> measured seconds."""


def steady(rng: random.Random, seconds: float) -> float:
    """CPU time, which no pause adds to: 6 % from step to step."""
    return seconds * rng.lognormvariate(0, 0.06)


def noisy(deviation: float) -> Noise:
    """A machine that does nothing else: the deviation from step to step, and a pause now and then."""

    def measured(rng: random.Random, seconds: float) -> float:
        seconds *= rng.lognormvariate(0, deviation)
        return seconds * rng.uniform(2, 20) if rng.random() < 0.02 else seconds

    return measured


quiet = noisy(0.05)
SLICE = 0.004


def busy(rng: random.Random, seconds: float) -> float:
    """A neighbour takes half of the time: slices of two plain steps, into which a step falls or does not."""
    seconds = quiet(rng, seconds)
    left, measured = seconds, 0.0
    while left > 0:
        mine = rng.expovariate(1 / SLICE)
        measured += min(mine, left)
        left -= mine
        if left > 0:
            measured += rng.expovariate(1 / SLICE)
    return measured


@dataclass
class Machine:
    """The prices of a step, in plain steps: those without drafts.

    Attributes:
        plain: seconds of a plain step.
        noise: what a step's time is measured as.
        cold: how many times longer the first step takes after another kind of step.
    """

    ask: float = 0.0
    token: float = 0.05
    verify: float = 0.0
    first_pass: float = 0.0
    model_token: float = 0.0
    plain: float = 0.002
    noise: Noise = quiet
    cold: float = 1.0

    def seconds(self, sequences: int, drafted: float, asked: bool = False, made: int | None = None) -> float:
        """True seconds of a step. `drafted`: tokens per sequence; `made`: those of the model's drafter, or None."""
        drafter = 0.0 if made is None else self.first_pass + self.model_token * made
        price = 1 + self.ask * asked + self.verify * (drafted > 0) + self.token * drafted + drafter
        return self.plain * price


# A tiny model on a CPU; a GPU; a GPU that many requests saturate.
CPU = Machine(ask=0.38, verify=0.17, token=0.08, first_pass=0.25, model_token=0.28, plain=0.003, noise=steady, cold=1.5)
GPU = Machine(ask=0.01, verify=0.02, token=0.01, first_pass=0.03, model_token=0.03, plain=0.03, noise=steady, cold=1.5)
SATURATED = replace(CPU, ask=0.05, verify=0.05, token=0.9, first_pass=0.3, model_token=0.2)


class Text(NamedTuple):
    """Text that the server knows or does not know.

    Attributes:
        known: share of the steps of a request in which the server has a draft.
        length: tokens of such a draft.
        right: probability that a token of the model's drafter is right if those before it are.
    """

    known: float
    length: int = 6
    right: float = 0.8

    def draft(self, rng: random.Random, least: float) -> tuple[float, int]:
        """Returns a draft of the server: the probability that a token of it is right, and its length."""
        return SURE, self.length if rng.random() < self.known else 0

    def promise(self, drafts: Sequence[tuple[float, int]]) -> Promise:
        """Returns what drafts promise: here what all of the text promises."""
        return Promise(1 + self.known * _accepted(SURE, self.length), self.known * self.length)


class Likely(NamedTuple):
    """Text of which each draft's tokens are right with a probability between two bounds; the server knows it."""

    low: float
    high: float
    right: float = 0.0

    def draft(self, rng: random.Random, least: float) -> tuple[float, int]:
        """As that of Text. `least`: the least probability to reach a token that is drafted."""
        chance = rng.uniform(self.low, self.high)
        if not 0 < least < 1:
            return chance, 0 if least else LONGEST
        return chance, min(int(math.log(least) / math.log(chance)), LONGEST)

    def promise(self, drafts: Sequence[tuple[float, int]]) -> Promise:
        """Returns what drafts promise: the means over these."""
        tokens = sum(_accepted(chance, length) for chance, length in drafts)
        return Promise(1 + tokens / len(drafts), sum(length for _, length in drafts) / len(drafts))


def _right(rng: random.Random, chance: float, length: int) -> int:
    """Returns how many tokens of a draft are right, if each is with this probability where those before it are."""
    if not 0 < chance < 1:
        return length if chance else 0
    return min(int(math.log(1 - rng.random()) / math.log(chance)), length)


def _accepted(chance: float, length: int) -> float:
    return sum(chance**i for i in range(1, length + 1))


class DraftingEngine:
    """Decodes requests side by side, and counts the true time."""

    def __init__(
        self,
        machine: Machine,
        text: Text | Likely,
        limits: Limits = NO_DRAFTER,
        cost: float | None = None,
        sequences: int = 8,
        seed: int = 0,
    ) -> None:
        """`cost`: as `verify_cost` of ModeChooser."""
        self.machine, self.text, self.sequences = machine, text, sequences
        self.outcomes, self.gains = Outcomes(limits.longest), LevelGains(limits.longest)
        self.drafter = limits is not NO_DRAFTER
        self.chooser = ModeChooser(cost, limits, (self.outcomes, self.gains) if self.drafter else None)
        self.seconds = self.tokens = 0.0
        self.modes: list[Mode] = []
        """Of each step."""
        self.numbers: list[int] = []
        """Tokens that the model's drafter made in each step, or REST."""
        self.drafted: list[int] = []
        """Tokens that each step verified."""
        self.asked: list[float | None] = []
        """The cost that each step asked with, or None."""
        self.prompts = 0.0
        """Share of the steps that also read a prompt."""
        self.probes = True
        """Whether the server is asked for drafts that no step verifies."""
        self._rng = random.Random(seed)
        self._left: list[float] = []  # tokens that each request will still get
        self._unread: list[bool] = []  # whether the drafter has not read its prompt
        self._made = 0  # tokens of the model's drafts that the next step verifies
        self._kind = NOTHING
        self._since_idle = 0
        # Generated tokens, steps and drafted tokens of requests, lately: what the server knows of its drafts.
        self._yield = 100 * STARTING_SPEED_UP, 100.0, 0.0

    def idle(self) -> None:
        """Ends all requests; others begin."""
        self._left, self._unread, self._since_idle = [], [], 0

    def run(self, steps: int) -> float:
        """Returns seconds per token of so many steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step()
        return (self.seconds - seconds) / (self.tokens - tokens)

    def share(self, mode: Mode, last: int = 300) -> float:
        """Returns the share of the last steps in a mode."""
        return self.modes[-last:].count(mode) / last

    def step(self) -> None:
        """Takes a step."""
        rng, chooser, machine = self._rng, self.chooser, self.machine
        cost = chooser.next()
        asked = cost is not None
        new = self._begin()
        number = REST
        if self.drafter:
            chooser.read = 1 - sum(self._unread) / self.sequences
            number = chooser.number(self.sequences, new > 0)
        runs = number != REST
        if not runs and new:
            self._unread[-new:] = [True] * new
        self._probe()
        drafted, accepted = self._verify(cost)
        self._made = max(number, 0)
        made, kind, generated = number if runs else None, Mode(asked, runs), self.sequences + accepted
        true = machine.seconds(self.sequences, drafted / self.sequences, asked, made)
        measured = machine.noise(rng, true) * (machine.cold if kind != self._kind else 1.0)
        prompt = rng.random() < self.prompts
        measured *= 3.0 if prompt else 1.0
        if not self._since_idle:
            measured = math.inf
        self.seconds += true
        self.tokens += generated
        quiet = not (asked or runs or drafted) and math.isfinite(measured)
        if not (quiet and chooser.passes()):
            alone = prompt or (new > 0 and self.drafter)
            chooser.observe(measured, self.sequences, self.sequences + drafted, generated, alone, made)
        kept = [i for i, left in enumerate(self._left) if left > 0]
        self._left, self._unread = [self._left[i] for i in kept], [self._unread[i] for i in kept]
        self._kind = kind
        self._since_idle += 1
        self.modes.append(kind)
        self.numbers.append(number)
        self.drafted.append(drafted)
        self.asked.append(cost)

    def _begin(self) -> int:
        """Begins requests until the batch is full, and returns how many; ends some if it is too large."""
        del self._left[self.sequences :], self._unread[self.sequences :]
        new = self.sequences - len(self._left)
        mean = LENGTH if self.drafter else math.inf
        self._left += [mean * self._rng.uniform(0.5, 1.5) for _ in range(new)]
        self._unread += [False] * new
        return new

    def _drafts(self, cost: float) -> list[tuple[float, int]]:
        least = cost * 1.1 * min(max(speedup(*self._yield, cost), 1.0), 4.0)
        return [self.text.draft(self._rng, least) for _ in self._left]

    def _probe(self) -> None:
        if not (self.probes and self.chooser.curious) or self._since_idle % PROBED != 1:
            return
        drafts = self._drafts(self.chooser.moderate)
        self.chooser.promised(self.text.promise(drafts))
        self.gains.saw_levels(np.array([LEVEL if length else 0 for _, length in drafts]))

    def _verify(self, cost: float | None) -> tuple[int, int]:
        """Verifies the drafts of each request. Returns how many tokens were drafted, and how many accepted."""
        rng, price = self._rng, self.chooser.price
        asked = cost is not None
        server = [(0.0, 0)] * len(self._left) if cost is None else self._drafts(cost)
        worth = self.outcomes.alone(price)
        depth = int(worth.argmax()) + 1 if worth.max() > 0 else 0
        rows = []
        for i, (chance, length) in enumerate(server):
            if not length:
                model = 0 if self._unread[i] else self._made if asked else min(self._made, depth)
                chance, length = self.text.right, model
            right = _right(rng, chance, length)
            self._left[i] -= 1 + right
            rows.append((length, right))
        drafted, accepted = sum(length for length, _ in rows), sum(right for _, right in rows)
        if asked:
            self._compare([length > 0 for _, length in server], price)
            generated = len(rows) + accepted
            tokens, steps, before = self._yield
            self._yield = 0.99 * tokens + generated, 0.99 * steps + len(rows), 0.99 * before + drafted
        elif self._made:
            verified, right = np.array(rows, np.int64).T
            self.outcomes.learn_alone(verified, right, np.zeros(len(rows), np.int64))
        return drafted, accepted

    def _compare(self, known: Sequence[bool], price: float) -> None:
        """Learns what the drafter adds where the server has no draft."""
        level = np.where(known, LEVEL, 0)
        self.gains.saw_levels(level)
        if self._made:
            each = np.cumsum(self.text.right ** np.arange(1, self._made + 1) - price)
            gain = np.maximum(each, 0.0)[None, :] * (level == 0)[:, None]
            self.gains.saw(Gains(level, gain), ~np.array(self._unread))


def best(machine: Machine, text: Text | Likely, limits: Limits = NO_DRAFTER, sequences: int = 8) -> float:
    """Returns seconds per token of the best mode, with the best cost and number of tokens, without any trial."""
    costs = (0.02, 0.05, 0.1, 0.3, machine.token / (1 + machine.ask), NOTHING_PAYS + 0.1)
    numbers = range(7) if limits is not NO_DRAFTER else (0,)
    engines = [
        DraftingEngine(machine, text, limits._replace(fixed=number) if number else NO_DRAFTER, cost, sequences)
        for cost, number in itertools.product(costs, numbers)
    ]
    seconds = [engine.run(100) for engine in engines]
    hopeful = [engine for engine, each in zip(engines, seconds, strict=True) if each < HOPEFUL * min(seconds)]
    return min(engine.run(max(50, 3000 // sequences)) for engine in hopeful)
