"""The cost of a drafted token, learned from simulated engines whose true cost is known."""

import math
import random
import statistics

import pytest

from histospec.client.vllm.choice import FixedCost, LearnedCost
from histospec.client.vllm.choice.learned import LONGEST_PAUSE, MODERATE
from histospec.client.vllm.choice.prices import HIGHEST, LOWEST
from histospec.protocol.costs import HOPELESS_VERIFY_COST, NOTHING_PAYS, STARTING_SPEED_UP

LONGEST = 16


class Machine:
    """Seconds of a step: flat up to `knee` tokens, linear beyond, a little for each sequence."""

    def __init__(self, knee: float, fixed: float = 0.02, sequence: float = 0.0, factor: float = 1.0) -> None:
        self.knee, self.fixed, self.sequence, self.factor = knee, fixed, sequence, factor

    def seconds(self, sequences: int, tokens: float) -> float:
        return self.factor * (self.fixed * max(1.0, tokens / self.knee) + self.sequence * sequences)

    def cost(self, sequences: int, drafted: float) -> float:
        """A drafted token's share of a plain step, `drafted` tokens a sequence."""
        plain = self.seconds(sequences, sequences)
        return (self.seconds(sequences, sequences * (1 + drafted)) / plain - 1) / drafted


class Rollout:
    """Steps of a batch on a machine, drafting as it learns to."""

    def __init__(
        self,
        cost: LearnedCost,
        machine: Machine,
        seed: int,
        noise: float = 0.03,
        predictable: tuple[float, float] = (0.5, 0.99),
    ) -> None:
        self.cost, self.machine, self.noise, self.predictable = cost, machine, noise, predictable
        self.random = random.Random(seed)
        self.seconds = self.tokens = self.plain_seconds = 0.0

    def drafts(self, sequences: int) -> tuple[int, float]:
        cost = self.cost.next()
        if cost is None:
            return 0, 0.0
        drafted, accepted = 0, 0.0
        for _ in range(sequences):
            chance, survival = self.random.uniform(*self.predictable), 1.0
            for _ in range(LONGEST):
                if survival * chance < cost * STARTING_SPEED_UP:
                    break
                survival *= chance
                drafted += 1
                accepted += survival
        return drafted, accepted

    def step(self, sequences: int, prefill: bool = False) -> int:
        drafted, accepted = self.drafts(sequences)
        true = seconds = self.machine.seconds(sequences, sequences + drafted)
        seconds *= self.random.lognormvariate(0, self.noise)
        if self.random.random() < 0.02:  # a collection of garbage, another process
            seconds *= self.random.uniform(2, 20)
        if prefill:
            seconds *= 3
        generated = sequences + round(accepted)
        self.cost.observe(
            seconds, sequences, sequences + drafted + (500 if prefill else 0), prefill, generated=generated
        )
        self.seconds += true
        self.tokens += sequences + accepted
        self.plain_seconds += self.machine.seconds(sequences, sequences)
        return drafted

    def run(self, sequences: int, steps: int) -> list[int]:
        return [self.step(sequences, prefill=self.random.random() < 0.1) for _ in range(steps)]


def test_nothing_is_known_at_first() -> None:
    cost = LearnedCost()
    assert not cost.learned
    assert cost.value == 0.05
    for _ in range(1000):  # steps that all draft the same say nothing
        cost.observe(0.01, 8, 8 + 16)
        assert cost.value == 0.05


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("sequences", "knee"),
    [(1, 200), (8, 200), (32, 400), (64, 128), (256, 2000), (256, 300), (256, 100), (1024, 500)],
)
def test_finds_the_cost(sequences: int, knee: int, seed: int) -> None:
    """Memory-bound, in between and saturated; whatever is drafted, it is the cost of about so many drafts."""
    cost = LearnedCost()
    rollout = Rollout(cost, Machine(knee), seed)
    rollout.run(sequences, 1500)
    assert cost.learned
    drafted = statistics.mean(d for d in rollout.run(sequences, 300)) / sequences
    least, most = sorted(rollout.machine.cost(sequences, d) for d in (max(drafted, 0.25), 12))
    assert 0.5 * min(least, 0.99) - 0.03 <= cost.value <= max(1.4 * most, 0.01) + 0.03


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_drafts_stay_around_the_knee(noise: float, seed: int) -> None:
    """Cheap up to the knee, dear beyond: a line through two steps beyond it would not pass through the plain one."""
    rollout = Rollout(LearnedCost(), Machine(knee=100), seed, noise)
    rollout.run(16, 50)
    drafted = rollout.run(16, 1000)
    assert statistics.mean(drafted) > 3 * 16
    assert rollout.cost.value < 0.3


@pytest.mark.parametrize("seed", range(3))
def test_drafts_vanish_at_saturation_and_curiosity_is_cheap(seed: int) -> None:
    cost = LearnedCost()
    rollout = Rollout(cost, Machine(knee=64), seed)
    rollout.run(256, 300)
    rollout.seconds = rollout.tokens = rollout.plain_seconds = 0.0
    drafted = rollout.run(256, 4000)
    assert cost.value > NOTHING_PAYS
    assert sum(d > 0 for d in drafted) <= 4000 / 100
    without = rollout.plain_seconds / (256 * len(drafted))
    assert rollout.seconds / rollout.tokens < 1.005 * without


@pytest.mark.parametrize("seed", range(3))
def test_follows_the_drain_of_a_rollout_and_the_next_one(seed: int) -> None:
    """
    1. 256 sequences on a saturated machine: high.
    2. They finish one after the other, to the last: low, and the tail drafts.
    3. The next rollout starts with 256 again: high from the first step on, without learning it anew.
    """
    cost = LearnedCost()
    machine = Machine(knee=100)
    rollout = Rollout(cost, machine, seed)
    rollout.run(256, 400)
    assert cost.value > 0.5
    for sequences in range(255, 0, -1):
        rollout.run(sequences, 3)
    drafted = rollout.run(1, 20)
    assert cost.value <= 0.05
    assert statistics.mean(drafted) > 2
    rollout.step(256)
    assert cost.value > 0.5
    for sequences in (192, 128, 64, 32, 16, 8, 4, 2):  # and each size is where it belongs
        rollout.run(sequences, 60)
        true = min(machine.cost(sequences, 4), 1)
        assert cost.value == pytest.approx(true, abs=0.25) or min(true, cost.value) > NOTHING_PAYS  # nothing is drafted


@pytest.mark.parametrize("seed", range(3))
def test_follows_drift(seed: int) -> None:
    """Slower contexts change nothing in the ratio; a neighbour that takes half of the machine away does, and leaves."""
    cost = LearnedCost()
    machine = Machine(knee=600)
    rollout = Rollout(cost, machine, seed)
    rollout.run(64, 1000)
    before = cost.value
    for step in range(2000):
        machine.factor = 1 + step / 500
        rollout.step(64)
    assert cost.value == pytest.approx(before, abs=0.03)
    machine.knee = 50
    rollout.run(64, 4000)
    assert cost.value > 0.6
    machine.knee = 600
    rollout.run(64, 8000)
    assert cost.value < 0.15


def test_probing_costs_little_where_drafts_pay() -> None:
    """Steps taken without drafts to measure them, beside a rollout that knows the cost."""
    cost = LearnedCost()
    rollout = Rollout(cost, Machine(knee=5000), 0, noise=0.01)
    rollout.run(256, 500)
    rollout.seconds = rollout.tokens = 0.0
    rollout.run(256, 4000)
    speed = rollout.tokens / rollout.seconds
    known = type("Known", (), {"next": lambda self: cost.value, "observe": lambda *_, **__: None})()
    best = Rollout(known, Machine(knee=5000), 1)
    best.run(256, 4000)
    assert speed > 0.99 * best.tokens / best.seconds


@pytest.mark.parametrize("seed", range(3))
def test_cost_of_sequences_is_not_taken_for_that_of_tokens(seed: int) -> None:
    """Long contexts: a sequence is slow to attend to, its drafted tokens are nearly free."""
    cost = LearnedCost()
    rollout = Rollout(cost, Machine(knee=10_000, fixed=0.005, sequence=0.0002), seed)
    for sequences in range(256, 8, -2):
        rollout.run(sequences, 4)
    assert cost.value < 0.07  # a sequence alone would make 0.3 of it


def test_sensible_whatever_it_is_told() -> None:
    cost, told = LearnedCost(), random.Random(1)
    seconds = [0.0, -1.0, math.nan, math.inf, 1e-9, 0.01, 1e9]
    for _ in range(20_000):
        sequences = told.choice([0, 1, 2, 3, 100, 4096])
        tokens = sequences + told.choice([0, 1, 17, 16 * sequences])
        cost.observe(told.choice(seconds), sequences, tokens, told.random() < 0.1)
        assert 0.01 <= cost.value <= 1
        asked = cost.next()
        assert asked is None or 0.01 <= asked <= 1


def test_a_few_steps_of_different_drafts_are_enough() -> None:
    """0, 2 and 6 drafted tokens a sequence take 10, 12 and 16 ms: one for each takes 1 ms, 0.1 of a plain step."""
    cost = LearnedCost()
    for step in range(30):
        drafted = (0, 2, 6)[step % 3]
        cost.observe(0.010 + 0.001 * drafted, 8, 8 * (1 + drafted))
    assert cost.learned
    assert cost.value == pytest.approx(0.1, abs=0.02)


def test_steps_with_prompts_and_idle_time_are_no_opinion() -> None:
    cost = LearnedCost()
    for step in range(50):
        drafted = 4 * (step % 2)
        cost.observe(0.010 + 0.001 * drafted, 8, 8 * (1 + drafted), alone=True)
        cost.observe(math.inf, 8, 8 * (1 + drafted))
    assert not cost.learned


def test_a_learned_cost_stays_within_bounds() -> None:
    for each, bound in ((0.0, LOWEST), (1.0, HIGHEST)):  # seconds of a drafted token, where a plain step takes 0.01
        cost = LearnedCost()
        for step in range(60):
            drafted = (0, 2, 6)[step % 3]
            cost.observe(0.010 + each * drafted, 8, 8 * (1 + drafted))
        assert cost.value == bound


def test_a_hopeless_cost_asks_only_now_and_then() -> None:
    cost = LearnedCost()
    for step in range(100):
        drafted = (0, 2, 6)[step % 3]
        cost.observe(0.010 + 0.008 * drafted, 8, 8 * (1 + drafted))
    assert cost.value == pytest.approx(0.8, abs=0.1)
    asked = []
    for _ in range(2000):
        asked.append(cost.next())
        drafted = 0 if asked[-1] is None else 8
        cost.observe(0.010 + 0.001 * drafted, 8, 8 + drafted, generated=8 + drafted // 4)
    assert 1 <= sum(a is not None for a in asked[1000:]) <= 1000 * 8 / LONGEST_PAUSE + 8
    assert {a for a in asked[1000:] if a is not None} == {MODERATE}


def test_a_fixed_cost_learns_nothing() -> None:
    for value, asked in ((0.0, 0.0), (0.45, 0.45), (HOPELESS_VERIFY_COST, None), (1.0, None)):
        cost = FixedCost(value)
        cost.observe(0.01, 8, 8 + 16)
        assert (cost.value, cost.learned, cost.next()) == (value, False, asked)
