"""The choice between four modes of drafting, on simulated engines whose prices and yields are known. No vLLM."""

import functools

import pytest

from histospec.client.vllm.choice.modes import (
    BOTH,
    DRAFTER,
    FIRST_PAUSE,
    FIRST_REST,
    LONGER_PAUSE,
    NOTHING,
    REST,
    SERVER,
    Limits,
    Pauses,
)
from histospec.protocol.costs import HOPELESS_VERIFY_COST, NOTHING_PAYS
from tests.support.drafting_engine import CPU, GPU, SATURATED, SEEDS, DraftingEngine, Text, best

FIRST_EPOCH, LATER, MIXED = Text(0.1, 3), Text(0.85), Text(0.6, right=0.9)
TEXTS = {
    "first epoch": FIRST_EPOCH,
    "later": LATER,
    "first epoch, useless drafter": FIRST_EPOCH._replace(right=0.0),
    "later, useless drafter": LATER._replace(right=0.0),
    "mixed": MIXED,
}

DRAFTERS = Limits(16)
MACHINES = {"cpu": CPU, "gpu": GPU, "saturated": SATURATED}


@functools.cache
def oracle(machine: str, text: Text) -> float:
    """Returns seconds per token of the best mode on a machine."""
    return best(MACHINES[machine], text, DRAFTERS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_nearly_as_fast_as_the_best_mode(machine: str, text: Text, seed: int) -> None:
    """The engine knows nothing at first. At saturation its first steps cost most, because all that drafts is slow."""
    engine = DraftingEngine(MACHINES[machine], text, DRAFTERS, seed=seed)
    early, late = engine.run(1000), engine.run(1000)
    assert early < (1.25 if machine == "saturated" else 1.15) * oracle(machine, text)
    assert late < 1.06 * oracle(machine, text)


@pytest.mark.parametrize("seed", range(3))
def test_where_history_is_empty_the_model_drafts_alone(seed: int) -> None:
    engine = DraftingEngine(CPU, FIRST_EPOCH, DRAFTERS, seed=seed)
    engine.run(1000)
    assert engine.share(DRAFTER, 1000) > 0.85
    engine.run(1000)
    assert engine.share(DRAFTER, 1000) > 0.95


@pytest.mark.parametrize("seed", range(3))
def test_history_is_found_at_once_when_the_next_epoch_begins(seed: int) -> None:
    """The server's drafts promise more than before. On this CPU the model's drafter then costs more than it adds."""
    engine = DraftingEngine(CPU, FIRST_EPOCH, DRAFTERS, seed=seed)
    engine.run(1000)
    engine.text = LATER
    engine.idle()
    engine.run(100)
    assert engine.share(SERVER, 50) > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_the_drafter_works_again_when_requests_without_history_begin(seed: int) -> None:
    engine = DraftingEngine(CPU, LATER, DRAFTERS, seed=seed)
    engine.run(600)
    assert engine.share(SERVER) > 0.9
    engine.text = FIRST_EPOCH
    for _ in range(3):
        engine.idle()
        engine.run(300)
    assert engine.share(DRAFTER) > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_both_draft_where_each_knows_what_the_other_does_not(seed: int) -> None:
    """On a GPU, where a pass of the drafter costs little."""
    engine = DraftingEngine(GPU, Text(0.4, 12, 0.6), DRAFTERS, seed=seed)
    engine.run(1000)
    assert engine.share(BOTH) > 0.8


def test_a_drafter_that_has_become_good_is_found_out() -> None:
    """It is tried again when requests begin, so that it has read all of them."""
    engine = DraftingEngine(CPU, FIRST_EPOCH._replace(right=0.0), DRAFTERS)
    engine.run(1000)
    assert engine.numbers[-300:].count(REST) > 280
    engine.text = FIRST_EPOCH
    for _ in range(6):
        engine.idle()
        engine.run(1000)
    assert engine.share(DRAFTER) > 0.8


def test_a_useless_drafter_runs_rarely() -> None:
    engine = DraftingEngine(CPU, FIRST_EPOCH._replace(right=0.0), DRAFTERS)
    for _ in range(10):
        engine.idle()
        engine.run(1000)
    assert sum(number != REST for number in engine.numbers) < 0.03 * len(engine.numbers)
    assert any(number != REST for number in engine.numbers[5000:])


def test_a_good_drafter_makes_more_tokens_than_a_poor_one() -> None:
    usual = []
    for right in (0.9, 0.5):
        engine = DraftingEngine(GPU, Text(0.0, right=right), DRAFTERS)
        engine.run(1500)
        usual.append(sorted(engine.numbers[-300:])[150])
    assert usual[0] > usual[1] >= 1


def test_a_number_that_is_set_is_made_in_every_step() -> None:
    for limits, made in (
        (Limits(16, 5), 5),
        (Limits(16, 0), REST),
        (Limits(16, 5, may_vary=False, may_rest=False), 16),
    ):
        engine = DraftingEngine(CPU, LATER, limits)
        engine.run(400)
        assert set(engine.numbers) == {made}


def test_a_drafter_that_cannot_vary_or_rest_makes_all() -> None:
    engine = DraftingEngine(CPU, LATER, Limits(16, may_vary=False, may_rest=False))
    engine.run(400)
    assert set(engine.numbers) == {16}
    engine = DraftingEngine(CPU, LATER, Limits(16, may_vary=False))
    engine.run(400)
    assert set(engine.numbers) == {16, REST}


@pytest.mark.parametrize("cost", [0.05, 0.3, NOTHING_PAYS + 0.1])
def test_a_cost_that_is_set_decides_whether_the_server_is_asked(cost: float) -> None:
    engine = DraftingEngine(CPU, LATER, DRAFTERS, cost)
    engine.run(400)
    asks = cost < HOPELESS_VERIFY_COST
    assert {mode.server for mode in engine.modes} == {asks}
    assert engine.chooser.value == cost
    assert not engine.chooser.curious
    assert not engine.chooser.learned


def test_the_cost_stays_what_was_measured_while_the_server_is_silent() -> None:
    engine = DraftingEngine(CPU, FIRST_EPOCH, DRAFTERS)
    engine.run(600)
    assert engine.chooser.curious
    assert engine.chooser.value < HOPELESS_VERIFY_COST


def test_quiet_steps_are_rarely_looked_at() -> None:
    """Neither drafts: the adapter leaves such steps out."""
    engine = DraftingEngine(CPU, FIRST_EPOCH._replace(right=0.0, known=0.0), DRAFTERS)
    engine.run(1000)
    assert engine.share(NOTHING) > 0.9
    passed = 0
    for _ in range(160):
        passed += engine.chooser.passes()
        engine.chooser.observe(0.003, 8, 8, 8)
    assert 0 < passed < 160


def test_each_failure_of_a_mode_is_followed_by_a_longer_pause() -> None:
    pauses = Pauses([NOTHING, SERVER, DRAFTER, BOTH])
    now, waits = 0, []
    for _ in range(3):
        pauses.tried(SERVER, now, rests=False)
        wait = next(n for n in range(10**5) if pauses.may_try(SERVER, now + n))
        waits.append(wait)
        now += wait
    assert waits == [FIRST_PAUSE, FIRST_PAUSE * LONGER_PAUSE, FIRST_PAUSE * LONGER_PAUSE**2]
    assert pauses.may_take(SERVER, 0)  # a failed trial forbids no change that other evidence demands
    pauses.left(SERVER, now, rests=False, mistaken=True)
    assert not pauses.may_take(SERVER, now)
    pauses.forgive_server()
    assert pauses.may_take(SERVER, now)
    assert pauses.may_try(SERVER, now)


def test_trials_that_never_last_become_rare() -> None:
    """Where each step also reads prompts, a trial without the drafter is cut short each time."""
    pauses, now, cut = Pauses([DRAFTER, NOTHING]), 0, 0
    while now < 10000:
        if pauses.may_try(NOTHING, now):
            pauses.cut_short(NOTHING, now)
            cut += 1
        now += 1
    assert cut < 12


def test_a_rest_becomes_longer_after_each_trial_that_failed() -> None:
    pauses = Pauses([NOTHING, DRAFTER])
    pauses.left(DRAFTER, 0, rests=True, mistaken=False)
    assert not pauses.rested(FIRST_REST - 1)
    assert pauses.rested(FIRST_REST)
    pauses.tried(DRAFTER, FIRST_REST, rests=True)
    assert not pauses.rested(2 * FIRST_REST)
    assert pauses.rested(FIRST_REST + LONGER_PAUSE * FIRST_REST)


@pytest.mark.parametrize("right", [0.0, 0.8])
def test_a_trial_that_begins_with_its_requests_ends(right: float) -> None:
    """After a rest, while the server drafts: the yield of its drafts for these requests is not known yet."""
    engine = DraftingEngine(CPU, LATER._replace(right=right), DRAFTERS)
    engine.run(FIRST_REST * (1 + LONGER_PAUSE) + 200)
    assert engine.share(SERVER) > 0.9
    for _ in range(4):
        engine.idle()
        engine.run(300)
        assert engine.share(SERVER, 250) > 0.9
    assert engine.modes[-1200:].count(BOTH) > 0


def test_an_engine_whose_steps_all_read_prompts_asks_the_server_by_its_promises() -> None:
    """No price can be learned, and nothing can be tried."""
    for text, share in (LATER, 1.0), (FIRST_EPOCH, 0.0):
        engine = DraftingEngine(GPU, text, DRAFTERS)
        engine.prompts = 1.0
        engine.run(600)
        assert engine.share(BOTH) == share
        assert engine.share(DRAFTER) == 1 - share
