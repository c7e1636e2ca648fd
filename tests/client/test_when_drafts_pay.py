"""Engines that learn for themselves whether drafts pay, beside what an oracle makes of the same engine."""

import pytest

from histospec.client.vllm.cost import LearnedCost
from histospec.client.vllm.cost.learned import LONGEST_PAUSE, PLAIN
from tests.support.step_times import Always, Engine, Machine, busy

LIKELY, UNLIKELY = (0.5, 0.99), (0.0, 0.7)
"""Probabilities of tokens: those of text that a history knows, and those of a first epoch."""


def oracle(machine: Machine, sequences: int, predictable: tuple[float, float]) -> float:
    """Seconds a token of whoever knows the best cost, or that no draft pays."""
    costs = (None, 0.02, 0.05, 0.1, 0.3, machine.token / (1 + machine.ask))
    steps = max(50, 3000 // sequences)
    return min(Engine(machine, Always(cost), 1, predictable).run(sequences, steps) for cost in costs)


@pytest.mark.parametrize("predictable", [LIKELY, UNLIKELY])
@pytest.mark.parametrize("sequences", [2, 16, 128])
@pytest.mark.parametrize(
    ("ask", "token"), [(0.0, 0.02), (0.05, 0.05), (0.3, 0.1), (0.85, 0.13), (0.3, 0.4), (0.0, 1.0)]
)
def test_no_slower_than_an_oracle(ask: float, token: float, sequences: int, predictable: tuple[float, float]) -> None:
    """Drafts that are free, that cost a CPU much to ask for, that a saturated machine cannot verify."""
    machine = Machine(ask, token)
    best = oracle(machine, sequences, predictable)
    engine = Engine(machine, LearnedCost(), 0, predictable)
    steps = 1500 if sequences < 100 else 500
    assert engine.run(sequences, steps) < 1.08 * best
    assert engine.run(sequences, steps) < 1.05 * best


@pytest.mark.parametrize("predictable", [LIKELY, UNLIKELY])
@pytest.mark.parametrize("sequences", [2, 16])
@pytest.mark.parametrize(("ask", "token"), [(0.05, 0.05), (0.3, 0.1), (0.85, 0.13), (0.0, 1.0)])
def test_beside_a_busy_neighbour(ask: float, token: float, sequences: int, predictable: tuple[float, float]) -> None:
    """Half of the time on the clock is the neighbour's: it takes longer to learn the same."""
    best = oracle(Machine(ask, token), sequences, predictable)
    engine = Engine(Machine(ask, token, noise=busy), LearnedCost(), 0, predictable)
    engine.run(sequences, 1500)
    assert engine.run(sequences, 3000) < 1.1 * best


@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_without_history_costs_little_and_the_next_one_drafts(seed: int) -> None:
    """
    1. 1500 steps in which drafts do not pay: at most 3 % slower than without any.
    2. The trainer learns. The same problems come back, and drafts pay from the first steps on.
    """
    machine = Machine(ask=0.85, token=0.13)
    first = Engine(machine, LearnedCost(), seed, UNLIKELY)
    assert first.run(16, 1500) < 1.03 * machine.plain(16) / 16
    again = Engine(machine, first.cost, seed + 10, LIKELY)
    again.step(16, idle=True)
    assert again.run(16, 400) < 1.08 * oracle(machine, 16, LIKELY)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_begin_to_pay_are_found_without_idling(seed: int) -> None:
    """An engine that never rests: it looks again at the latest after LONGEST_PAUSE steps."""
    machine = Machine(ask=1.2, token=0.1)
    engine = Engine(machine, LearnedCost(), seed, UNLIKELY)
    engine.run(16, 3000)
    assert engine.asked < 300
    engine.predictable = LIKELY
    engine.run(16, LONGEST_PAUSE + 20)
    assert engine.run(16, 500) < 1.1 * oracle(machine, 16, LIKELY)


def test_begins_with_plain_steps() -> None:
    """What they take is the unit of all prices; then it drafts."""
    cost = LearnedCost()
    asked = []
    for _ in range(PLAIN + 3):
        asked.append(cost.next())
        cost.observe(0.01, 8, 8, generated=8)
    assert asked[:PLAIN] == [None] * PLAIN
    assert None not in asked[PLAIN:]


def test_steps_that_say_nothing_of_their_tokens_never_stop_drafts() -> None:
    cost = LearnedCost()
    for _ in range(200):
        asked = cost.next() is not None
        cost.observe(0.03 if asked else 0.01, 8, 8 + 8 * asked)
    assert cost.value > 0.5
    assert sum(cost.next() is not None for _ in range(5)) >= 4


def test_drafts_of_the_models_own_drafter_count_on_both_sides() -> None:
    """Without a draft of the server, the model's own drafter gives as many tokens: then asking does not pay."""
    cost = LearnedCost()
    asked = []
    for _ in range(600):
        asked.append(cost.next() is not None)
        cost.observe(0.01 * (1.5 + 0.3 * asked[-1]), 8, 8 + 16, model_tokens=2, generated=20)
    assert sum(asked[300:]) < 60
