"""Engines that learn whether drafts pay, compared with an oracle on the same engine. No drafter of the model's own."""

import functools
from typing import Any

import pytest

from histospec.client.vllm.choice.chooser import FEWEST, UNASKED, ModeChooser
from tests.support.drafting_engine import DraftingEngine, Likely, Machine, best, busy

LIKELY, UNLIKELY = Likely(0.5, 0.99), Likely(0.0, 0.7)
"""Text that the history knows, and that of a first epoch."""


@functools.cache
def oracle(ask: float, token: float, text: Likely, sequences: int) -> float:
    """Returns seconds per token with the best fixed cost, or without drafts if none pays."""
    return best(Machine(ask, token), text, sequences=sequences)


@pytest.mark.parametrize("text", [LIKELY, UNLIKELY], ids=["likely", "unlikely"])
@pytest.mark.parametrize("sequences", [2, 16, 128])
@pytest.mark.parametrize(
    ("ask", "token"), [(0.0, 0.02), (0.05, 0.05), (0.3, 0.1), (0.85, 0.13), (0.3, 0.4), (0.0, 1.0)]
)
def test_no_slower_than_an_oracle(ask: float, token: float, sequences: int, text: Likely) -> None:
    """Drafts that are nearly free, that a CPU pays much to ask for, and that a saturated machine cannot verify."""
    fastest = oracle(ask, token, text, sequences)
    engine = DraftingEngine(Machine(ask, token), text, sequences=sequences)
    steps = 1500 if sequences < 100 else 500
    assert engine.run(steps) < 1.08 * fastest
    assert engine.run(steps) < 1.05 * fastest


@pytest.mark.parametrize("text", [LIKELY, UNLIKELY], ids=["likely", "unlikely"])
@pytest.mark.parametrize("sequences", [2, 16])
@pytest.mark.parametrize(("ask", "token"), [(0.05, 0.05), (0.3, 0.1), (0.85, 0.13), (0.0, 1.0)])
def test_with_a_busy_neighbour(ask: float, token: float, sequences: int, text: Likely) -> None:
    """The neighbour takes half of the wall-clock time, so learning the same takes longer."""
    engine = DraftingEngine(Machine(ask, token, noise=busy), text, sequences=sequences)
    engine.run(1500)
    assert engine.run(3000) < 1.1 * oracle(ask, token, text, sequences)


@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_without_history_costs_little_and_the_next_one_drafts(seed: int) -> None:
    """
    1. 1500 steps in which drafts do not pay: at most 3 % slower than without any.
    2. The trainer updates the policy. The same problems return, and drafts pay from the first steps on.
    """
    machine = Machine(ask=0.85, token=0.13)
    engine = DraftingEngine(machine, UNLIKELY, sequences=16, seed=seed)
    assert engine.run(1500) < 1.03 * machine.plain / 16
    engine.idle()
    engine.text = LIKELY
    engine.step()
    assert engine.run(400) < 1.08 * oracle(0.85, 0.13, LIKELY, 16)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_begin_to_pay_are_found_without_idling(seed: int) -> None:
    """An engine that is never idle tries drafts again when they promise to pay, or after UNASKED steps."""
    engine = DraftingEngine(Machine(ask=1.2, token=0.1), UNLIKELY, sequences=16, seed=seed)
    engine.run(3000)
    assert sum(mode.server for mode in engine.modes) < 300
    engine.text = LIKELY
    engine.run(UNASKED + 20)
    assert engine.run(500) < 1.1 * oracle(1.2, 0.1, LIKELY, 16)


def test_begins_with_plain_steps() -> None:
    """Their time is the unit of all prices; then the engine drafts, if the server's drafts promise to pay."""
    engine = DraftingEngine(Machine(), LIKELY)
    engine.run(30)
    asked = [mode.server for mode in engine.modes]
    assert not any(asked[:FEWEST])
    assert all(asked[2 * FEWEST :])


def test_drafts_whose_promises_are_wrong_are_tried_now_and_then() -> None:
    """The server's estimates say that nothing pays, and no step verifies any of its drafts to correct them."""
    engine = DraftingEngine(Machine(), UNLIKELY, sequences=16)
    engine.probes = False
    engine.machine = Machine(ask=2.0)
    engine.run(1500)
    engine.machine, engine.text = Machine(), LIKELY
    engine.run(UNASKED + 100)
    assert sum(mode.server for mode in engine.modes[-50:]) > 40


def test_steps_that_pass_teach_nothing() -> None:
    """The time of the next step is unknown, because the clock was last read before them."""
    chooser = ModeChooser()
    prices: Any = chooser._worth.prices
    seconds: list[float] = []
    observe, since, passed = prices.observe, 0.0, 0

    def noting(number: int, measured: float, *others: Any) -> None:
        seconds.append(measured)
        observe(number, measured, *others)

    prices.observe = noting
    for _ in range(3000):
        asked = chooser.next() is not None
        since += 0.03 if asked else 0.01
        if not asked and chooser.passes():
            passed += 1
            continue
        chooser.observe(since, 8, 8, 8)
        since = 0.0
    assert passed > 2000
    assert {round(each, 4) for each in seconds} == {0.01, 0.03}
