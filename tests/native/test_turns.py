"""Multi-turn problems without an id: a later turn is recognised by its first prompt."""

import numpy as np
import numpy.typing as npt
import pytest

from histospec.native import Engine

Tokens = npt.NDArray[np.int32]
NONE = np.array([], np.int32)


def tokens(seed: int, n: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, n, dtype=np.int32)


def turn(engine: Engine, prompt: Tokens, response: Tokens) -> tuple[int, int]:
    """One turn, committed; returns how many tokens of its prompt name the problem and how many the first draft had."""
    session, length, _ = engine.open_session("run", prompt)
    sessions = np.array([session])
    drafted = len(engine.step(sessions, NONE, np.array([0, 0]))[0])
    engine.step(sessions, response, np.array([0, len(response)]))
    engine.close(session)
    return length, drafted


PROMPT, ANSWER, TOOL, SECOND = tokens(1, 50), tokens(2, 30), tokens(3, 20), tokens(4, 30)


@pytest.mark.parametrize("built", [False, True])
def test_a_later_turn_belongs_to_the_problem_that_it_began_with(built: bool) -> None:
    engine = Engine()
    later = np.concatenate([PROMPT, ANSWER, TOOL])
    assert turn(engine, PROMPT, ANSWER) == (50, 0)
    if built:
        engine.wait_until_built()
    assert turn(engine, later, SECOND) == (50, 0)
    if built:
        engine.wait_until_built()
    # Next epoch: another answer, but the first tokens are those of an old one; and the second turn is foreseen.
    answer = np.concatenate([ANSWER[:10], tokens(5, 20)])
    turn(engine, PROMPT, answer)
    length, drafted = turn(engine, np.concatenate([PROMPT, answer, TOOL]), SECOND)
    assert length == 50
    assert drafted > 0
    assert engine.stats()["namespaces"]["run"]["problems"] == 1
    engine.check_integrity()


def test_a_longer_prompt_that_no_response_began_is_a_problem_of_its_own() -> None:
    engine = Engine()
    turn(engine, PROMPT, ANSWER)
    assert turn(engine, np.concatenate([PROMPT, TOOL]), SECOND) == (70, 0)
    assert engine.stats()["namespaces"]["run"]["problems"] == 2


def test_the_longest_known_prompt_counts_and_an_exact_one_before_all() -> None:
    engine = Engine()
    later = np.concatenate([PROMPT, ANSWER, TOOL])
    turn(engine, PROMPT, ANSWER)
    engine.ingest("run", later, [SECOND])
    assert turn(engine, later, SECOND)[0] == len(later)
    assert turn(engine, np.concatenate([later, SECOND, TOOL]), ANSWER)[0] == len(later)


def test_an_explicit_id_is_never_guessed() -> None:
    engine = Engine()
    turn(engine, PROMPT, ANSWER)
    later = np.concatenate([PROMPT, ANSWER, TOOL])
    assert engine.open_session("run", later, problem="named")[1] == len(later)
    assert engine.stats()["namespaces"]["run"]["problems"] == 2


def test_what_is_dropped_is_not_continued() -> None:
    engine = Engine()
    turn(engine, PROMPT, ANSWER)
    engine.drop_namespace("run")
    later = np.concatenate([PROMPT, ANSWER, TOOL])
    assert turn(engine, later, SECOND)[0] == len(later)
    engine.check_integrity()
