"""The simulation of benchmarks/asynchronous/simulate.py, where the answer is known otherwise; and the replay of
places.py, in which asynchronous scheduling must verify no more than it may."""

import random
from dataclasses import fields, replace

import pytest

from benchmarks.asynchronous.places import Counts, Epoch, Settings, asynchronous, synchronous, total
from benchmarks.asynchronous.simulate import WAYS, Times, waits

END = 20
NOTHING = Times(**{field.name: 0.0 for field in fields(Times)})


def test_a_host_and_a_server_without_delays_cost_nothing() -> None:
    assert waits(replace(NOTHING, step=30), 50) == dict.fromkeys(WAYS, 0.0)


def test_only_the_answer_is_waited_for_by_all_that_draft() -> None:
    found = waits(replace(NOTHING, step=30, answer=5, deadline=100), 5000)
    for name, wait in found.items():
        assert wait == pytest.approx(0 if "no drafts" in name else 5, rel=0.05), name


def test_no_step_waits_beyond_the_deadline() -> None:
    found = waits(replace(NOTHING, step=30, answer=500, deadline=20), 50)
    assert max(found.values()) == pytest.approx(20)


def test_the_host_is_hidden_as_far_as_it_runs_ahead() -> None:
    """Bookkeeping by both asynchronous ways, the preparation of a step by the stream-ordered one only."""
    found = waits(replace(NOTHING, step=30, update=2, schedule=1, prepare=1, prepare_v1=3, deadline=20), 5000)
    assert found["asynchronous, no drafts"] == pytest.approx(0, abs=0.01)
    assert found["stream-ordered"] == pytest.approx(0, abs=0.01)
    assert found["V2 blocking"] == pytest.approx(1, rel=0.05)
    assert found["V2 synchronous"] == pytest.approx(4, rel=0.05)
    assert found["V1"] == pytest.approx(6, rel=0.05)


def test_more_host_than_step_is_not_hidden() -> None:
    found = waits(replace(NOTHING, step=1, update=20, deadline=20), 2000)
    assert min(found.values()) > 15


def policy(seed: int, likeliest: bool) -> dict[int, Epoch]:
    """Three visits of 16 problems by a policy that follows the last two letters: its likeliest text, or samples.

    A response has 60 letters and an end token.
    """
    chance, epochs = random.Random(seed), dict[int, Epoch]()
    table: dict[tuple[int, int], list[int]] = {}
    for number in range(1, 4):
        epochs[number] = []
        for problem in range(16):
            text = [problem % 8, problem // 8, problem]
            for _ in range(60):
                letters = table.setdefault((text[-2], text[-1]), chance.choices(range(20), k=3))
                text.append(letters[0] if likeliest or chance.random() < 0.7 else chance.choice(letters))
            epochs[number].append((text[:3], [*text[3:], END]))
    return epochs


@pytest.mark.parametrize("limit", [61, 1000])
@pytest.mark.parametrize("likeliest", [True, False])
def test_asynchronous_scheduling_verifies_as_much_and_gains_as_much(likeliest: bool, limit: int) -> None:
    """In each visit, the first and the second included; with responses that end at their limit, and before it."""
    epochs, settings = policy(1, likeliest), Settings(together=12, limit=limit)
    one, other = [*synchronous(epochs, settings)], [*asynchronous(epochs, settings)]
    assert total(other).tokens == total(one).tokens == 3 * 16 * 61
    for a, b in zip(one, other, strict=True):
        assert a.verified > 0
        assert b.verified <= 1.3 * a.verified
        assert b.rate >= 0.95 * a.rate
    assert other[1].rate > 1.5 * other[0].rate or not likeliest


def test_a_step_after_the_end_of_a_request_counts_what_it_verifies() -> None:
    counts = Counts()
    counts.add([1, 2], [1, 2, 3])
    counts.add([4], [])
    assert (counts.verified, counts.steps, counts.tokens, counts.late) == (3, 1, 3, 1)
