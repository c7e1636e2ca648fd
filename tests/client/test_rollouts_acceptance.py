"""`accept_prefix` is Algorithm 1 of the SPEC-RL paper, and what follows from it for the distribution."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from histospec.client.rollouts import accept_prefix
from histospec.client.rollouts.acceptance import accept_until_wrong

LOGPROBS = st.one_of(st.floats(-30, 0), st.sampled_from([0.0, -math.inf, -1e-9, -650.0]))
LENIENCES = st.one_of(st.floats(0.01, 100), st.sampled_from([1.0, math.exp(0.5), 1e-300, 1e300, math.inf]))
UNIFORMS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 5e-324, 1 - 2**-53]))


def algorithm_1(new: Sequence[float], old: Sequence[float], lenience: float, uniforms: Sequence[float]) -> int:
    """The paper's algorithm: the position of the first token whose draw is above min(1, lenience * p_new / p_old)."""
    for i, (n, o, u) in enumerate(zip(new, old, uniforms, strict=True)):
        p_new, p_old = math.exp(n), math.exp(o)
        if p_new == 0 and (p_old == 0 or lenience == math.inf):
            return i  # the product is not defined
        ratio = math.inf if p_old == 0 else lenience * (p_new / p_old)
        if not u <= min(1, ratio):
            return i
    return len(new)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, UNIFORMS), max_size=40), LENIENCES)
@example([(-math.inf, -math.inf, 0.0)], 1.0)
@example([(-1.0, -math.inf, 0.999)], 1.0)
@example([(-math.inf, -1.0, 0.0)], math.inf)
@example([(-math.inf, -1.0, 0.0)], 2.0)
def test_equals_algorithm_1(rows: list[tuple[float, float, float]], lenience: float) -> None:
    new, old, uniforms = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    for n, o, u in rows:
        if -math.inf < n and -math.inf < o and lenience < math.inf:
            # A product too small for a float is 0 to the naive form alone, and one equal to the draw may round.
            log_ratio = n - o + math.log(lenience)
            assume(abs(log_ratio) < 700)
            assume(u == 0 or abs(math.log(u) - log_ratio) > 1e-9)
    assert accept_prefix(new, old, lenience, uniforms) == algorithm_1(new, old, lenience, uniforms)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, UNIFORMS), max_size=20), st.data())
def test_a_value_that_is_no_log_probability_rejects_its_token(
    rows: list[tuple[float, float, float]], draw: st.DataObject
) -> None:
    new, old, uniforms = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    accepted = accept_prefix(new, old, 1.0, uniforms)
    assert accept_until_wrong(new, old, 1.0, uniforms) == accepted
    for values in (new, old):
        place = draw.draw(st.integers(0, len(rows)))
        values[place : place + 1] = [draw.draw(st.sampled_from([math.nan, math.inf]))] * (place < len(rows))
        accepted = min(accepted, place)
        assert accept_until_wrong(new, old, 1.0, uniforms) == accepted


def test_where_probabilities_are_too_small_for_a_float() -> None:
    assert accept_prefix([-2000.0], [-2000.5], 1, [0.999]) == 1
    assert accept_prefix([-2000.5], [-2000.0], 1, [0.7]) == 0
    assert accept_prefix([-1e4], [-1.0], 1e300, [0.1]) == 0
    assert accept_prefix([-1.0], [-1e4], 1e300, [0.9]) == 1


def test_equal_policies_keep_everything() -> None:
    logprobs = np.log(np.random.default_rng(0).random(1000, np.float32))
    assert accept_prefix(logprobs, logprobs, 1.0, np.full(1000, 1 - 2**-53)) == 1000


def test_infinite_lenience_keeps_what_can_be_written() -> None:
    new, old = [-5.0, -700.0, -math.inf, -1.0], [-0.1, 0.0, -1.0, -1.0]
    assert accept_prefix(new, old, math.inf, [0.99] * 4) == 2


def test_a_draw_on_the_bound_is_accepted() -> None:
    ratio = math.exp(-0.75)
    assert accept_prefix([-1.0], [-0.25], 1, [ratio]) == 1
    assert accept_prefix([-1.0], [-0.25], 1, [np.nextafter(ratio, 1)]) == 0


@pytest.mark.parametrize("lenience", [1.0, math.exp(0.5), 0.5])
def test_the_first_token_is_distributed_as_the_docs_say(lenience: float) -> None:
    """A mixture: accepted tokens of the old policy, else new draws of the new policy. It equals neither policy."""
    random = np.random.default_rng(1)
    old, new = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.3, 0.4])
    accepted = old * np.minimum(1, lenience * new / old)
    expected = accepted + (1 - accepted.sum()) * new
    draws = random.choice(3, 40_000, p=old)
    kept = [
        accept_prefix([math.log(new[x])], [math.log(old[x])], lenience, [u])
        for x, u in zip(draws, random.random(len(draws)), strict=True)
    ]
    fresh = random.choice(3, len(draws), p=new)
    counts = np.bincount(np.where(kept, draws, fresh), minlength=3)
    chi2 = ((counts - len(draws) * expected) ** 2 / (len(draws) * expected)).sum()
    assert chi2 < 20
    assert ((counts - len(draws) * new) ** 2 / (len(draws) * new)).sum() > 200  # it is not the new policy's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1.0], [-1.0, -2.0], 1, [0.5]), r"^old_logprobs: 2 values for 1 of new_logprobs$"),
        (([-1.0], [-1.0], 1, []), r"^uniforms: 0 values for 1"),
        (([[-1.0]], [-1.0], 1, [0.5]), r"^new_logprobs: must be one-dimensional, has shape \(1, 1\)$"),
        (([-1.0], -1.0, 1, [0.5]), r"^old_logprobs: must be one-dimensional"),
        ((["x"], [-1.0], 1, [0.5]), r"^new_logprobs: must be numbers"),
        (([-1.0, math.nan], [-1.0, -1.0], 1, [0.5, 0.5]), r"^new_logprobs: value 1 is nan, not a log-probability$"),
        (([-1.0], [math.inf], 1, [0.5]), r"^old_logprobs: value 0 is inf"),
        (([-1.0], [-1.0], 1, [1.0]), r"^uniforms: value 0, 1.0, is outside \[0, 1\)$"),
        (([-1.0], [-1.0], 1, [-0.1]), r"^uniforms: value 0, -0.1"),
        (([-1.0], [-1.0], 1, [math.nan]), r"^uniforms: value 0, nan"),
        (([-1.0], [-1.0], 0, [0.5]), r"^lenience: is 0, must be a number above 0$"),
        (([-1.0], [-1.0], -1.0, [0.5]), r"^lenience: is -1.0"),
        (([-1.0], [-1.0], math.nan, [0.5]), r"^lenience: is nan"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accept_prefix(*arguments)
