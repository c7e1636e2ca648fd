"""`Engine.step` returns the most probable other token in the place of each drafted one."""

from typing import Any

import numpy as np
import pytest

from histospec.native import Engine

PROMPT = np.array([1, 2, 3], np.int32)
LENGTH, LONGEST = 300, 16


def text(rng: np.random.Generator, base: np.ndarray) -> np.ndarray:
    """`base` with a tenth of its tokens changed, among few others, so that changes meet."""
    return np.where(rng.random(LENGTH) < 0.1, 500 + rng.integers(0, 2, LENGTH), base).astype(np.int32)


@pytest.mark.parametrize("left_out", [False, True], ids=["raising", "leaving out"])
def test_they_are_other_tokens_that_followed_in_the_history(left_out: bool) -> None:
    """Asking for them changes no draft: a second engine, which is not asked, drafts the same."""
    rng = np.random.default_rng(7)
    base = rng.integers(0, 400, LENGTH)
    history, target = [text(rng, base) for _ in range(6)], text(rng, base)
    known = {tuple(each[i : i + 2].tolist()) for each in [*history, target] for i in range(LENGTH - 1)}
    engines: list[Any] = [Engine(memory_bytes=1 << 26) for _ in range(2)]
    for engine in engines:
        engine.ingest("run", PROMPT, history, epoch=0)
    sessions = [np.array([engine.open("run", PROMPT)], np.int64) for engine in engines]
    options: dict[str, Any] = {"positions": np.zeros(1, np.int64), "most_tokens": 1000} if left_out else {}
    found = right = 0
    for at in range(LENGTH - 1):
        if left_out:
            options["positions"] = np.array([at], np.int64)
        step = (target[at : at + 1], np.array([0, 1], np.int64), LONGEST, 0.0)
        *plain, others, probs = engines[0].step(sessions[0], *step, runners_up=True, **options)
        for one, other in zip(plain, engines[1].step(sessions[1], *step, **options), strict=True):
            np.testing.assert_array_equal(one, other)
        tokens = plain[0]
        assert (others.dtype, probs.dtype) == (np.int32, np.float32)
        assert len(others) == len(probs) == len(tokens)
        assert ((others == -1) == (probs == 0)).all()
        assert ((probs >= 0) & (probs < 1)).all()
        assert (others != tokens).all()
        for before, other in zip([target[at], *tokens[:-1]], others, strict=True):
            assert other == -1 or (int(before), int(other)) in known
        if len(tokens):
            found += others[0] != -1
            right += target[at + 1] == others[0]
    assert found > 50
    assert right > 5


def test_without_drafts_there_are_none() -> None:
    engine: Any = Engine(memory_bytes=1 << 26)
    session = np.array([engine.open("run", PROMPT)], np.int64)
    result = engine.step(session, np.array([5], np.int32), np.array([0, 1], np.int64), 0, runners_up=True)
    assert [len(each) for each in result] == [0, 2, 0, 0, 0]
