"""The learned state of an estimator moves to another engine bit by bit, or not at all."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from histospec.native import Engine

TEXT = np.random.default_rng(0).integers(0, 50, 400, dtype=np.int32)


OTHER = np.where(np.arange(400) % 7 == 6, 60, TEXT).astype(np.int32)  # so that there are alternatives


def taught(namespace: str = "run", seed: int | None = None) -> Engine:
    engine = Engine()
    engine.ingest(namespace, [1, 2, 3], [TEXT, OTHER])
    session = engine.open(namespace, [1, 2, 3], seed=seed)
    for part in np.split(TEXT, 100):
        engine.step(np.array([session]), part, np.array([0, len(part)]))
    engine.close(session, commit=False)
    return engine


def probabilities(engine: Engine, seed: int | None = None) -> npt.NDArray[np.float32]:
    session = engine.open("run", [1, 2, 3], seed=seed)
    return engine.step(np.array([session]), TEXT[:5], np.array([0, 5]), 16, 0.0)[2]


@pytest.mark.parametrize("seed", [None, 7])
def test_a_restored_estimator_estimates_the_same(seed: int | None) -> None:
    engine, other, naive = taught(seed=seed), Engine(), Engine()
    other.restore_estimator("run", engine.estimator_state("run"))
    for fresh in (other, naive):
        fresh.ingest("run", [1, 2, 3], [TEXT, OTHER])
    assert np.array_equal(probabilities(other, seed), probabilities(engine, seed))
    assert not np.array_equal(probabilities(naive, seed), probabilities(engine, seed))


def test_a_state_has_the_same_fields_whatever_was_learned() -> None:
    without, with_noise = taught().estimator_state("run"), taught(seed=7).estimator_state("run")
    assert without.startswith(b"HistoSpec estimator 1\n")
    assert len(with_noise) == len(without)
    engine = Engine()
    engine.restore_estimator("run", without)
    assert engine.estimator_state("run") == without


def test_a_field_is_a_little_endian_float() -> None:
    """The first field is the tokens of the latest steps: the starting value, and those of the steps since."""
    engine = Engine()
    engine.ingest("run", [1, 2, 3], [TEXT])
    session = engine.open("run", [1, 2, 3])
    for part in np.split(TEXT[:20], 4):
        engine.step(np.array([session]), part, np.array([0, 5]), 1, 0.0)
    head, fields = engine.estimator_state("run").split(b"\n", 1)
    numbers = np.frombuffer(fields, "<f4")
    assert head == b"HistoSpec estimator 1"
    assert 200 < numbers[0] < 300  # tokens, of
    assert 90 < numbers[1] < 120  # steps


def test_nothing_learned_is_empty() -> None:
    assert Engine().estimator_state("unknown") == b""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: b"", "of this version"),
        (lambda state: b"x" + state[1:], "of this version"),
        (lambda state: state.replace(b" 1\n", b" 2\n", 1), "of this version"),
        (lambda state: state[:-1], "too short"),
        (lambda state: state + b"x", "too long"),
        (lambda state: state[:222] + np.array(np.nan, np.float32).tobytes() + state[226:], "out of range"),
        (lambda state: state[:-4] + np.array(np.nan, np.float32).tobytes(), "out of range"),
    ],
)
@pytest.mark.parametrize("seed", [None, 7])
def test_a_damaged_state_is_refused_and_changes_nothing(
    damage: Callable[[bytes], bytes], message: str, seed: int | None
) -> None:
    engine = taught(seed=seed)
    state = engine.estimator_state("run")
    with pytest.raises(ValueError, match=message):
        engine.restore_estimator("run", damage(state))
    assert engine.estimator_state("run") == state
    with pytest.raises(ValueError, match="namespace"):
        engine.restore_estimator("", state)
