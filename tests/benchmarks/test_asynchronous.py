"""The simulation of benchmarks/asynchronous/simulate.py, where the answer is known otherwise."""

from dataclasses import fields, replace

import pytest

from benchmarks.asynchronous.simulate import WAYS, Times, waits

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
