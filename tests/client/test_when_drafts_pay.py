"""Engines that learn whether drafts pay, compared with an oracle on the same engine."""

import math
from typing import Any

import pytest

from histospec.client.vllm.choice import LearnedCost, Promise
from histospec.client.vllm.choice.learned import LONGEST_PAUSE, PLAIN
from tests.support.step_times import Always, Engine, Machine, busy

LIKELY, UNLIKELY = (0.5, 0.99), (0.0, 0.7)
"""Ranges of token probabilities: of text that the history knows, and of a first epoch."""


def oracle(machine: Machine, sequences: int, predictable: tuple[float, float]) -> float:
    """Returns seconds per token with the best fixed cost, or without drafts if none pays."""
    costs = (None, 0.02, 0.05, 0.1, 0.3, machine.token / (1 + machine.ask))
    steps = max(50, 3000 // sequences)
    return min(Engine(machine, Always(cost), 1, predictable).run(sequences, steps) for cost in costs)


@pytest.mark.parametrize("predictable", [LIKELY, UNLIKELY])
@pytest.mark.parametrize("sequences", [2, 16, 128])
@pytest.mark.parametrize(
    ("ask", "token"), [(0.0, 0.02), (0.05, 0.05), (0.3, 0.1), (0.85, 0.13), (0.3, 0.4), (0.0, 1.0)]
)
def test_no_slower_than_an_oracle(ask: float, token: float, sequences: int, predictable: tuple[float, float]) -> None:
    """Drafts that are nearly free, that a CPU pays much to ask for, and that a saturated machine cannot verify."""
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
    """The neighbour takes half of the wall-clock time, so learning the same takes longer."""
    best = oracle(Machine(ask, token), sequences, predictable)
    engine = Engine(Machine(ask, token, noise=busy), LearnedCost(), 0, predictable)
    engine.run(sequences, 1500)
    assert engine.run(sequences, 3000) < 1.1 * best


@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_without_history_costs_little_and_the_next_one_drafts(seed: int) -> None:
    """
    1. 1500 steps in which drafts do not pay: at most 3 % slower than without any.
    2. The trainer updates the policy. The same problems return, and drafts pay from the first steps on.
    """
    machine = Machine(ask=0.85, token=0.13)
    first = Engine(machine, LearnedCost(), seed, UNLIKELY)
    assert first.run(16, 1500) < 1.03 * machine.plain(16) / 16
    again = Engine(machine, first.cost, seed + 10, LIKELY)
    again.step(16, idle=True)
    assert again.run(16, 400) < 1.08 * oracle(machine, 16, LIKELY)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_begin_to_pay_are_found_without_idling(seed: int) -> None:
    """An engine that is never idle tries drafts again when they promise to pay, or after LONGEST_PAUSE steps."""
    machine = Machine(ask=1.2, token=0.1)
    engine = Engine(machine, LearnedCost(), seed, UNLIKELY)
    engine.run(16, 3000)
    assert engine.asked < 300
    engine.predictable = LIKELY
    engine.run(16, LONGEST_PAUSE + 20)
    assert engine.run(16, 500) < 1.1 * oracle(machine, 16, LIKELY)


def test_begins_with_plain_steps() -> None:
    """Their time is the unit of all prices; then the engine drafts."""
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


def test_says_when_a_trial_begins_after_the_next_step() -> None:
    """The tokens since the last report are sent before, so the first message of the trial is like the others."""
    cost, asked, said = LearnedCost(), [], []
    for _ in range(6000):
        asked.append(cost.next() is not None)
        cost.observe(0.03 if asked[-1] else 0.01, 8, 8, generated=8)
        said.append(cost.looks_next)
    begins = [i for i in range(50, 6000) if asked[i] and not asked[i - 1]]
    assert len(begins) >= 3
    assert [i + 2 for i in range(48, 5998) if said[i]] == begins


def test_steps_that_pass_teach_nothing() -> None:
    """The time of the next step is unknown, because the clock was last read before them."""
    cost = LearnedCost()
    told: list[float] = []
    prices: Any = cost._here.prices
    observe = prices.observe

    def noting(number: int, seconds: float, *others: Any) -> None:
        told.append(seconds)
        observe(number, seconds, *others)

    prices.observe = noting
    asked, since, passed = False, 0.0, 0
    for _ in range(3000):
        since += 0.03 if asked else 0.01
        if not asked and cost.passes():
            passed += 1
            continue
        cost.observe(since, 8, 8, generated=8)
        asked, since = cost.next() is not None, 0.0
    assert passed > 2000
    assert {round(seconds, 4) for seconds in told} == {0.01, 0.03}


def test_the_first_step_of_a_trial_says_nothing_of_its_price() -> None:
    """Code and data of drafts have left the caches, so it takes longer."""
    cost, asked = LearnedCost(), [False]

    def steps(count: int, tokens: float, idle: bool = False) -> int:
        for number in range(count):
            asked.append(cost.next() is not None)
            seconds = 0.002 * (3 if asked[-1] else 1) + 0.03 * (asked[-1] and not asked[-2])
            generated = round(8 * tokens) if asked[-1] else 8
            cost.observe(math.inf if idle and not number else seconds, 8, 8 + 16 * asked[-1], generated=generated)
            if idle and not number:
                cost.promised(Promise(tokens, 2.0))
        return sum(asked[-count:])

    assert steps(1500, 1.2) < 200
    assert steps(200, 3.6, idle=True) > 150
