"""Engines that do not exist: steps whose true price is known, with the noise of real machines."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from histospec.client.vllm.choice import LearnedCost, Promise
from histospec.protocol.costs import STARTING_SPEED_UP, speedup

LONGEST = 16  # tokens of a draft
PROBED = 64  # every 64th step, drafts are asked for that no step verifies

Noise = Callable[[random.Random, float], float]
"""(random numbers, true seconds) -> measured seconds."""


class Cost(Protocol):
    """What decides about drafts."""

    def next(self) -> float | None: ...
    def observe(
        self,
        seconds: float,
        sequences: int,
        tokens: int,
        alone: bool = False,
        generated: int | None = None,
    ) -> None: ...


class Always:
    """Asks for drafts in every step, at one cost; None: in no step."""

    def __init__(self, cost: float | None) -> None:
        self.cost = cost

    def next(self) -> float | None:
        """The cost."""
        return self.cost

    def observe(self, *_: object, **__: object) -> None:
        """Learns nothing."""


def quiet(told: random.Random, seconds: float) -> float:
    """A machine that does nothing else: 5 % from step to step, and a pause now and then."""
    seconds *= told.lognormvariate(0, 0.05)
    return seconds * told.uniform(2, 20) if told.random() < 0.02 else seconds


def busy(told: random.Random, seconds: float) -> float:
    """A neighbour takes half of the time: slices of two plain steps, into which a step falls or does not."""
    seconds = quiet(told, seconds)
    left, measured = seconds, 0.0
    while left > 0:
        mine = told.expovariate(1 / SLICE)
        measured += min(mine, left)
        left -= mine
        if left > 0:
            measured += told.expovariate(1 / SLICE)
    return measured


SLICE = 0.004


@dataclass
class Machine:
    """Seconds of a decoding step: plain ones, and the prices of what else it does in units of these."""

    ask: float = 0.0
    token: float = 0.05
    first_pass: float = 0.0
    model_token: float = 0.0
    plain: Callable[[int], float] = lambda sequences: 0.002
    noise: Noise = quiet

    def price(self, asked: bool, drafted: float, model_tokens: int | None = None) -> float:
        """In plain steps; `drafted`: tokens a sequence."""
        drafter = 0.0 if model_tokens is None else self.first_pass + self.model_token * model_tokens
        return 1 + self.ask * asked + self.token * drafted + drafter


@dataclass
class Engine:
    """Decodes with drafts whose tokens are right with probabilities within `predictable`."""

    machine: Machine
    cost: Cost
    seed: int = 0
    predictable: tuple[float, float] = (0.5, 0.99)
    seconds: float = 0.0
    """True ones."""
    tokens: int = 0
    asked: int = 0
    _steps: int = -1
    """Since the engine was idle."""
    _random: random.Random = field(init=False)
    _cost: float | None = field(init=False)
    """To ask with in the next step."""
    _yield: tuple[float, float, float] = (100 * STARTING_SPEED_UP, 100.0, 0.0)
    """Tokens, steps and drafted tokens, lately: what the server knows of its drafts."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._cost = self.cost.next()

    def step(self, sequences: int, context: float = 1.0, idle: bool = False) -> None:
        """One step; contexts make all of it `context` times as long."""
        told, cost = self._random, self._cost
        drafted = accepted = 0
        self._steps = -1 if idle else self._steps + 1
        if isinstance(self.cost, LearnedCost) and self.cost.curious and self._steps % PROBED == 0:
            drafted, _, expected = self._drafts(sequences, self.cost.moderate)
            self.cost.promised(Promise(1 + expected / sequences, drafted / sequences))
            drafted = 0
        if cost is not None:
            drafted, accepted, _ = self._drafts(sequences, cost)
        true = context * self.machine.plain(sequences)
        true *= self.machine.price(cost is not None, drafted / sequences)
        measured = float("inf") if idle else self.machine.noise(told, true)
        generated = sequences + accepted
        nothing = cost is None and not idle
        if nothing and isinstance(self.cost, LearnedCost) and self.cost.passes():
            self._cost = None
        else:
            self.cost.observe(measured, sequences, sequences + drafted, False, generated)
            self._cost = self.cost.next()
        if cost is not None:
            before = self._yield
            self._yield = (0.99 * before[0] + generated, 0.99 * before[1] + sequences, 0.99 * before[2] + drafted)
        self.seconds += true
        self.tokens += generated
        self.asked += cost is not None

    def _drafts(self, sequences: int, cost: float) -> tuple[int, int, float]:
        """Tokens that are drafted, accepted, and expected to be."""
        told, drafted, accepted, expected = self._random, 0, 0, 0.0
        least = cost * 1.1 * min(max(speedup(*self._yield, cost), 1.0), 4.0)
        for _ in range(sequences):
            chance, survival, right = told.uniform(*self.predictable), 1.0, True
            for _ in range(LONGEST):
                survival *= chance
                if survival < least:
                    break
                drafted += 1
                expected += survival
                right = right and told.random() < chance
                accepted += right
        return drafted, accepted, expected

    def run(self, sequences: int, steps: int) -> float:
        """Seconds a token of so many steps."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step(sequences)
        return (self.seconds - seconds) / (self.tokens - tokens)
