"""Steps that leave out sessions which cannot step, compared with `step` of the others."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from histospec.native import Engine

STEPPED, UNKNOWN, TOO_LONG = range(3)
SESSIONS = 6
RESPONSE = np.random.default_rng(0).integers(0, 30, 300, dtype=np.int32)


def engine_with_sessions() -> Engine:
    engine = Engine(memory_bytes=1 << 28)
    engine.ingest("run", [1], [RESPONSE])
    for _ in range(SESSIONS):
        engine.open("run", [1])
    return engine


def flat(texts: Sequence[NDArray[np.int32]], chosen: Iterable[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The tokens of the chosen ones, and their offsets."""
    some = [texts[i] for i in chosen]
    return np.concatenate([np.empty(0, np.int32), *some]), np.cumsum([0, *map(len, some)]).astype(np.int64)


# Session, how far its position is from what it has, tokens.
row = st.tuples(st.integers(0, SESSIONS + 2), st.integers(-3, 3), st.integers(0, 9))


@settings(max_examples=300)
@given(
    steps=st.lists(st.lists(row, max_size=SESSIONS, unique_by=lambda r: r[0]), min_size=1, max_size=8),
    most=st.integers(5, 40),
    max_tokens=st.sampled_from([0, 8]),
)
def test_the_others_step_as_if_they_were_alone(
    steps: list[list[tuple[int, int, int]]], most: int, max_tokens: int
) -> None:
    tolerant, strict = engine_with_sessions(), engine_with_sessions()
    for rows in steps:
        ids = np.array([session for session, _, _ in rows], np.int64)
        held = strict.lengths(ids)
        at = np.maximum(held + np.array([offset for _, offset, _ in rows], np.int64), 0)
        new = np.array([tokens for _, _, tokens in rows], np.int64)
        texts = [RESPONSE[a : a + n] for a, n in zip(at, new, strict=True)]
        outcomes = np.where(at + new > most, TOO_LONG, np.where((held < 0) | (at > held), UNKNOWN, STEPPED))

        every, steps_on = np.arange(len(rows)), np.flatnonzero(outcomes == STEPPED)
        tokens, offsets, probs, said = tolerant.step(
            ids, *flat(texts, every), positions=at, most_tokens=most, max_tokens=max_tokens
        )
        expected = strict.step(ids[steps_on], *flat(texts, steps_on), positions=at[steps_on], max_tokens=max_tokens)
        assert said.tolist() == outcomes.tolist()
        assert said.dtype == np.uint8
        lengths = np.diff(offsets)
        assert not lengths[outcomes != STEPPED].any()
        assert lengths[steps_on].tolist() == np.diff(expected[1]).tolist()
        assert tokens.tolist() == expected[0].tolist()
        assert probs.tolist() == expected[2].tolist()
    assert tolerant.lengths(np.arange(9)).tolist() == strict.lengths(np.arange(9)).tolist()
    assert tolerant.stats() == strict.stats()


def test_the_limit_is_checked() -> None:
    engine = engine_with_sessions()
    before = engine.stats()
    for wrong, says in (
        ({"most_tokens": -1, "positions": np.array([0])}, "most_tokens: is -1, must be at least 0"),
        ({"most_tokens": 100}, "positions: must be given with most_tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.step(np.array([1]), RESPONSE[:3], np.array([0, 3]), **wrong)
    assert engine.stats() == before


def test_no_position_is_too_far() -> None:
    """Numbers at the end of what int64 holds."""
    far = 2**63 - 1
    engine = engine_with_sessions()
    sessions, offsets, positions = np.array([1, 2]), np.array([0, 1, 2]), np.array([far, 0])
    for most in (0, 100, far):
        *_, outcomes = engine.step(sessions, RESPONSE[:2], offsets, positions=positions, most_tokens=most)
        assert outcomes.tolist() == [TOO_LONG, TOO_LONG if most == 0 else STEPPED]
