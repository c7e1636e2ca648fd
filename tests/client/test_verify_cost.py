"""The cost of a drafted token, learned from simulated engines whose true cost is known."""

import math
import random
import statistics
from dataclasses import dataclass

import pytest

from histospec.client.vllm.choice.chooser import MODERATE, UNASKED, ModeChooser
from histospec.client.vllm.choice.prices import HIGHEST, LOWEST, StepPrices, work_of
from histospec.client.vllm.choice.worth import Promise
from histospec.protocol.costs import HOPELESS_VERIFY_COST, NOTHING_PAYS
from tests.support.drafting_engine import SEEDS, DraftingEngine, Likely, Machine, noisy

TEXT = Likely(0.5, 0.99)


@dataclass
class Knee(Machine):
    """Seconds of a step: flat up to `knee` tokens, linear beyond, a little for each sequence."""

    knee: float = 0.0
    fixed: float = 0.02
    sequence: float = 0.0
    factor: float = 1.0

    def seconds(self, sequences: int, drafted: float, asked: bool = False, made: int | None = None) -> float:
        tokens = sequences * (1 + drafted)
        return self.factor * (self.fixed * max(1.0, tokens / self.knee) + self.sequence * sequences)

    def cost(self, sequences: int, drafted: float) -> float:
        """A drafted token's share of a plain step, `drafted` tokens a sequence."""
        return (self.seconds(sequences, drafted) / self.seconds(sequences, 0) - 1) / drafted


class Rollout(DraftingEngine):
    """Steps of a batch on a machine, one in ten of which also reads a prompt."""

    def __init__(self, knee: float, seed: int, noise: float = 0.03, **machine: float) -> None:
        super().__init__(Knee(noise=noisy(noise), knee=knee, **machine), TEXT, seed=seed)
        self.machine: Knee
        self.prompts = 0.1

    def take(self, sequences: int, steps: int) -> list[int]:
        """Takes steps, and returns how many tokens each drafted."""
        self.sequences = sequences
        self.run(steps)
        return self.drafted[-steps:]

    @property
    def cost(self) -> float:
        """The cost that it learned."""
        return self.chooser.value


def test_nothing_is_known_at_first() -> None:
    prices = StepPrices()
    assert not prices.verify_cost_known
    assert prices.cost == 0.05
    for number in range(1000):  # steps that all draft the same say nothing
        prices.observe(number, 0.01, 8, work_of(True, 2.0, None))
        assert prices.cost == 0.05


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("sequences", "knee"),
    [(1, 200), (8, 200), (32, 400), (64, 128), (256, 2000), (256, 300), (256, 100), (1024, 500)],
)
def test_finds_the_cost(sequences: int, knee: int, seed: int) -> None:
    """Memory-bound, in between and saturated; whatever is drafted, it is the cost of about so many drafts."""
    rollout = Rollout(knee, seed)
    rollout.take(sequences, 1500)
    assert rollout.chooser.learned
    drafted = statistics.mean(rollout.take(sequences, 300)) / sequences
    least, most = sorted(rollout.machine.cost(sequences, d) for d in (max(drafted, 0.25), 12))
    assert 0.5 * min(least, 0.99) - 0.03 <= rollout.cost <= max(1.4 * most, 0.01) + 0.03


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_drafts_stay_around_the_knee(noise: float, seed: int) -> None:
    """Cheap up to the knee, dear beyond: a line through two steps beyond it would not pass through the plain one."""
    rollout = Rollout(100, seed, noise)
    rollout.take(16, 50)
    assert statistics.mean(rollout.take(16, 1000)) > 3 * 16
    assert rollout.cost < 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_vanish_at_saturation_and_curiosity_is_cheap(seed: int) -> None:
    rollout = Rollout(64, seed)
    rollout.take(256, 300)
    seconds, tokens = rollout.seconds, rollout.tokens
    drafted = rollout.take(256, 4000)
    assert rollout.cost > NOTHING_PAYS
    assert sum(d > 0 for d in drafted) <= 4000 / 100
    without = rollout.machine.seconds(256, 0) / 256
    assert (rollout.seconds - seconds) / (rollout.tokens - tokens) < 1.005 * without


@pytest.mark.parametrize("seed", SEEDS)
def test_follows_the_drain_of_a_rollout_and_the_next_one(seed: int) -> None:
    """
    1. 256 sequences on a saturated machine: high.
    2. They finish one after the other, to the last: low, and the tail drafts.
    3. The next rollout starts with 256 again: high from the first step on, without learning it anew.
    """
    rollout = Rollout(100, seed)
    rollout.take(256, 400)
    assert rollout.cost > 0.5
    for sequences in range(255, 0, -1):
        rollout.take(sequences, 3)
    drafted = rollout.take(1, 20)
    assert rollout.cost <= 0.05
    assert statistics.mean(drafted) > 2
    rollout.take(256, 1)
    assert rollout.cost > 0.5
    for sequences in (192, 128, 64, 32, 16, 8, 4, 2):  # and each size is where it belongs
        drafted = rollout.take(sequences, 60)
        true = min(rollout.machine.cost(sequences, 8), 1)
        shown = rollout.chooser.value
        nothing = shown > NOTHING_PAYS or not any(drafted[-8:])  # is drafted
        assert shown == pytest.approx(true, abs=0.25) or (true > NOTHING_PAYS and nothing)


@pytest.mark.parametrize("seed", SEEDS)
def test_follows_drift(seed: int) -> None:
    """Slower contexts change nothing in the ratio; a neighbour that takes half of the machine away does, and leaves."""
    rollout = Rollout(600, seed)
    rollout.take(64, 1000)
    before, rollout.prompts = rollout.cost, 0.0
    for step in range(2000):
        rollout.machine.factor = 1 + step / 500
        rollout.take(64, 1)
    assert rollout.cost == pytest.approx(before, abs=0.03)
    rollout.machine.knee, rollout.prompts = 50, 0.1
    rollout.take(64, 4000)
    assert rollout.cost > 0.6
    rollout.machine.knee = 600
    rollout.take(64, 8000)
    assert rollout.cost < 0.15


def test_probing_costs_little_where_drafts_pay() -> None:
    """Steps taken without drafts to measure them, in a rollout that knows the cost."""
    rollout = Rollout(5000, 0, noise=0.01)
    rollout.take(256, 500)
    drafted = rollout.take(256, 4000)
    assert sum(d == 0 for d in drafted) < 0.01 * len(drafted)


@pytest.mark.parametrize("seed", SEEDS)
def test_cost_of_sequences_is_not_taken_for_that_of_tokens(seed: int) -> None:
    """Long contexts: a sequence is slow to attend to, its drafted tokens are nearly free."""
    rollout = Rollout(10_000, seed, fixed=0.005, sequence=0.0002)
    for sequences in range(256, 8, -2):
        rollout.take(sequences, 4)
    assert rollout.cost < 0.07  # a sequence alone would make 0.3 of it


def test_sensible_whatever_it_observes() -> None:
    chooser, rng = ModeChooser(), random.Random(1)
    seconds = [0.0, -1.0, math.nan, math.inf, 1e-9, 0.01, 1e9]
    for _ in range(20_000):
        sequences = rng.choice([0, 1, 2, 3, 100, 4096])
        drafted = rng.choice([0, 1, 17, 16 * sequences])
        generated = sequences + rng.randint(0, drafted)
        chooser.observe(rng.choice(seconds), sequences, sequences + drafted, generated, rng.random() < 0.1)
        if rng.random() < 0.1:
            chooser.promised(Promise(rng.uniform(1, 17), rng.uniform(0, 16)))
        assert 0.01 <= chooser.value <= 1
        asked = chooser.next()
        assert asked is None or 0.01 <= asked <= 1


def learned(each: float) -> StepPrices:
    """Returns the prices after plain steps of 10 ms, in which a drafted token for each sequence takes `each` more."""
    prices = StepPrices()
    for number in range(60):
        drafted = (0, 2, 6)[number % 3]
        prices.observe(number, 0.01 + each * drafted, 8, work_of(drafted > 0, drafted, None))
    return prices


def test_a_few_steps_of_different_drafts_are_enough() -> None:
    assert learned(0.001).verify_cost_known
    assert learned(0.001).cost == pytest.approx(0.1, abs=0.02)


def test_a_learned_cost_stays_within_bounds() -> None:
    assert learned(0.0).cost == LOWEST
    assert learned(1.0).cost == HIGHEST


def test_steps_with_prompts_and_idle_time_are_no_opinion() -> None:
    chooser = ModeChooser()
    for step in range(50):
        drafted = 4 * (step % 2)
        chooser.observe(0.010 + 0.001 * drafted, 8, 8 * (1 + drafted), 8, alone=True)
        chooser.observe(math.inf, 8, 8 * (1 + drafted), 8)
    assert not chooser.learned


@pytest.mark.parametrize("seed", [1, 2, 4])  # with others it may take longer to learn the cost
def test_a_hopeless_cost_asks_only_now_and_then(seed: int) -> None:
    engine = DraftingEngine(Machine(ask=0.2, token=0.8, noise=noisy(0.01)), Likely(0.0, 0.7), seed=seed)
    engine.run(1000)
    assert engine.chooser.value > NOTHING_PAYS
    engine.run(1000)
    asked = engine.asked[-1000:]
    assert 1 <= sum(a is not None for a in asked) <= 1000 * 8 / UNASKED + 8
    assert {a for a in asked if a is not None} == {MODERATE}


@pytest.mark.parametrize(("cost", "asked"), [(0.0, 0.0), (0.45, 0.45), (HOPELESS_VERIFY_COST, None), (1.0, None)])
def test_a_fixed_cost_learns_nothing(cost: float, asked: float | None) -> None:
    engine = DraftingEngine(Machine(), TEXT, cost=cost)
    engine.run(100)
    assert (engine.chooser.value, engine.chooser.learned, engine.chooser.next()) == (cost, False, asked)
