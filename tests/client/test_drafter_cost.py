"""Learning the cost of the model's own drafter, from simulated steps with known prices."""

import random

import pytest

from histospec.client.vllm.choice.prices import StepPrices, work_of
from tests.support.drafting_engine import Machine, Noise, busy, quiet

MAKES = (None, 0, 1, 2, 3, 5)
"""Tokens that the model's drafter makes in a step; None: it does not run."""


class Steps:
    """Steps of one batch size, which ask for drafts or not, and verify up to six tokens per request."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        self.machine, self.prices = machine, StepPrices()
        self._rng, self._number = random.Random(seed), 0

    def take(self, sequences: int, count: int, makes: tuple[int | None, ...] = MAKES, context: float = 1.0) -> None:
        """Takes steps. `makes`: what the drafter makes, at random; `context`: how much longer all of a step takes."""
        for _ in range(count):
            self._number += 1
            asked, made = self._rng.random() < 0.8, self._rng.choice(makes)
            drafted = float(asked and self._rng.randint(0, 6))
            true = context * self.machine.seconds(sequences, drafted, asked, made)
            measured = self.machine.noise(self._rng, true)
            self.prices.observe(self._number, measured, sequences, work_of(asked, drafted, made))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sequences", [4, 64])
@pytest.mark.parametrize(
    ("noise", "tolerance", "steps"), [(quiet, 0.15, 300), (busy, 0.35, 3000)], ids=["quiet", "busy"]
)
def test_finds_both_prices(noise: Noise, tolerance: float, steps: int, sequences: int, seed: int) -> None:
    """Learns the prices of a drafter on a CPU and on a GPU, while the server's drafts vary in the same steps."""
    for first_pass, token in ((0.6, 0.25), (0.05, 0.03)):
        engine = Steps(Machine(0.1, 0.1, 0.0, first_pass, token, noise=noise), seed)
        engine.take(sequences, steps)
        assert engine.prices.drafter_known
        assert engine.prices.plain_known
        assert engine.prices.each.first_pass == pytest.approx(first_pass, abs=tolerance)
        assert engine.prices.each.model_token == pytest.approx(token, abs=tolerance / 2)


@pytest.mark.parametrize("made", [None, 3])
def test_unknown_until_it_varies(made: int | None) -> None:
    """The cost of a drafter that runs in every step, or in none, cannot be measured."""
    engine = Steps(Machine(first_pass=0.6, model_token=0.2))
    assert not engine.prices.drafter_known
    engine.take(16, 500, makes=(made,))
    assert not engine.prices.drafter_known


@pytest.mark.parametrize("seed", range(2))
def test_longer_contexts(seed: int) -> None:
    """Contexts grow until a step takes three times as long: the prices, in units of a step without drafts, stay."""
    engine = Steps(Machine(0.1, 0.1, 0.0, 0.6, 0.25), seed)
    for step in range(2000):
        engine.take(16, 1, context=1 + step / 1000)
    assert engine.prices.each.first_pass == pytest.approx(0.6, abs=0.3)
    assert engine.prices.each.model_token == pytest.approx(0.25, abs=0.15)


def test_another_batch_starts_from_the_prices_of_the_nearest() -> None:
    """They are estimates there, and become known with few steps."""
    engine = Steps(Machine(0.1, 0.1, 0.0, 0.6, 0.25))
    engine.take(16, 500)
    other = StepPrices(engine.prices, distance=2)
    assert other.each.first_pass == engine.prices.each.first_pass
    assert other.plain_known
    assert other.steps == 0
    engine.prices = other
    engine.take(8, 60)
    assert other.drafter_known
    assert other.each.first_pass == pytest.approx(0.6, abs=0.3)


def test_no_price_is_negative() -> None:
    """If a pass costs nothing, noise makes its measured price negative half of the time."""
    engine = Steps(Machine(), 1)
    engine.take(16, 500)
    prices = engine.prices
    assert min(prices.each.first_pass, prices.each.model_token, prices.each.verify) >= 0
    assert max(prices.each.first_pass, prices.each.model_token) < 0.05


def test_the_servers_cost_is_learned_with_it() -> None:
    """The time of the model's drafter does not count as a cost of verified tokens."""
    engine = Steps(Machine(ask=0.1, token=0.1, first_pass=0.6, model_token=0.25), 1)
    engine.take(16, 600)
    assert engine.prices.each.token == pytest.approx(0.1, abs=0.06)
    assert engine.prices.verify_cost == pytest.approx(0.1 / 1.1, abs=0.06)
