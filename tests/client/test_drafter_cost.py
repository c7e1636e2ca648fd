"""Learning the cost of the model's own drafter, from simulated engines with known prices."""

import random
from collections.abc import Callable

import pytest

from histospec.client.vllm.cost import FixedCost, LearnedCost
from tests.support.step_times import Engine, Machine, Noise, busy, quiet

MAKES = (None, 0, 1, 2, 3, 5)
"""Tokens that the model's drafter makes in a step; None: it does not run."""


def vary(engine: Engine, sequences: int, steps: int, seed: int) -> None:
    """Takes steps in which the number of tokens of the model's drafter varies at random."""
    told = random.Random(seed)
    for _ in range(steps):
        engine.step(sequences, model_tokens=told.choice(MAKES))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", [LearnedCost, lambda: FixedCost(0.1)])
@pytest.mark.parametrize("sequences", [4, 64])
@pytest.mark.parametrize(
    ("noise", "tolerance", "steps"), [(quiet, 0.15, 300), (busy, 0.35, 3000)], ids=["quiet", "busy"]
)
def test_finds_both_prices(
    noise: Noise, tolerance: float, steps: int, sequences: int, make: Callable[[], LearnedCost | FixedCost], seed: int
) -> None:
    """Learns the prices of a drafter on a CPU and on a GPU, while the server's drafts vary in the same steps."""
    for first_pass, token in ((0.6, 0.25), (0.05, 0.03)):
        machine = Machine(0.1, 0.1, first_pass * 1.1, token * 1.1, noise=noise)  # in units of a step that asks
        cost = make()
        engine = Engine(machine, cost, seed)
        vary(engine, sequences, steps, seed)
        assert cost.drafter is not None
        assert cost.drafter.first_pass == pytest.approx(first_pass, abs=tolerance)
        assert cost.drafter.token == pytest.approx(token, abs=tolerance / 2)


def test_unknown_until_it_varies() -> None:
    """The cost of a drafter that runs in every step, or in none, cannot be measured."""
    for made in (None, 3):
        cost = LearnedCost()
        engine = Engine(Machine(first_pass=0.6, model_token=0.2), cost)
        assert cost.drafter is None
        for _ in range(500):
            engine.step(16, model_tokens=made)
        assert cost.drafter is None


@pytest.mark.parametrize("seed", range(2))
def test_longer_contexts_and_other_batches(seed: int) -> None:
    """
    1. Contexts grow until a step takes three times as long: the prices, in units of a step without drafts, stay.
    2. The batch halves, and halves again: the prices stay known.
    """
    machine = Machine(0.1, 0.1, 0.66, 0.275, plain=lambda sequences: 0.001 + 0.0001 * sequences)
    cost = LearnedCost()
    engine = Engine(machine, cost, seed)
    told = random.Random(seed)
    for step in range(2000):
        engine.step(16, context=1 + step / 1000, model_tokens=told.choice(MAKES))
    for sequences in (16, 8, 4):
        for _ in range(30):
            engine.step(sequences, context=3, model_tokens=told.choice(MAKES))
        assert cost.drafter is not None
        assert cost.drafter == pytest.approx((0.6, 0.25), abs=0.3)


def test_no_price_is_negative() -> None:
    """If a pass costs nothing, noise makes its measured price negative half of the time."""
    cost = LearnedCost()
    engine = Engine(Machine(), cost)
    vary(engine, 16, 500, 1)
    assert cost.drafter is not None
    assert min(cost.drafter) >= 0
    assert max(cost.drafter) < 0.05


def test_the_servers_cost_is_learned_beside_it() -> None:
    """The time of the model's drafter does not count as a cost of verified tokens."""
    machine = Machine(ask=0.1, token=0.1, first_pass=0.6, model_token=0.25)
    cost = LearnedCost()
    engine = Engine(machine, cost)
    vary(engine, 16, 600, 1)
    assert cost.value == pytest.approx(0.1 / 1.1, abs=0.06)
