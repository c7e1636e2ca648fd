"""The learned state of an estimator moves to another engine bit by bit, or not at all."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from histospec.native import Engine

TEXT = np.random.default_rng(0).integers(0, 50, 400, dtype=np.int32)


def taught(namespace: str = "run") -> Engine:
    engine = Engine()
    engine.ingest(namespace, [1, 2, 3], [TEXT])
    session = engine.open(namespace, [1, 2, 3])
    for part in np.split(TEXT, 100):
        engine.step(np.array([session]), part, np.array([0, len(part)]))
    engine.close(session, commit=False)
    return engine


def probabilities(engine: Engine) -> npt.NDArray[np.float32]:
    session = engine.open("run", [1, 2, 3])
    return engine.step(np.array([session]), TEXT[:5], np.array([0, 5]))[2]


def test_a_restored_estimator_estimates_the_same() -> None:
    engine, other, naive = taught(), Engine(), Engine()
    other.restore_estimator("run", engine.estimator_state("run"))
    for fresh in (other, naive):
        fresh.ingest("run", [1, 2, 3], [TEXT])
    assert np.array_equal(probabilities(other), probabilities(engine))
    assert not np.array_equal(probabilities(naive), probabilities(engine))


def test_nothing_learned_is_empty() -> None:
    assert Engine().estimator_state("unknown") == b""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: b"", "of this version"),
        (lambda state: b"x" + state[1:], "of this version"),
        (lambda state: state[:-1], "too short"),
        (lambda state: state + b"x", "too long"),
        (lambda state: state[:222] + np.array(np.nan, np.float32).tobytes() + state[226:], "out of range"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: Callable[[bytes], bytes], message: str) -> None:
    engine = taught()
    state = engine.estimator_state("run")
    with pytest.raises(ValueError, match=message):
        engine.restore_estimator("run", damage(state))
    assert engine.estimator_state("run") == state
    with pytest.raises(ValueError, match="namespace"):
        engine.restore_estimator("", state)
