"""Scores of a replay: the sessions of a group run in step, and every verified token is an observation."""

from collections.abc import Sequence

import numpy as np
import pytest

from histospec.replay.drafters import Draft, Drafter, EngineDrafter, Sources
from histospec.replay.plan import case_at
from histospec.replay.recordings import Problem, RecordedResponse, Tokens, Turn
from histospec.replay.scores import Case, Verified, deciles, follow, score, teach

PROMPT = np.array([1, 2, 3], np.int32)


def turn(tokens: object, generated: bool = True) -> Turn:
    return Turn(np.array(tokens, np.int32), generated)


class Recorder(EngineDrafter):
    """The engine, with a record of every step."""

    def __init__(self) -> None:
        super().__init__(0.02, 16)
        self.steps: list[list[tuple[int, list[int], int]]] = []  # per session: id, new tokens, length of its draft

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        drafts = super().step(sessions, new)
        self.steps.append(
            [(s, n.tolist(), len(d.tokens)) for s, n, d in zip(sessions, new, drafts, strict=True)],
        )
        return drafts


def test_a_group_is_of_one_visit_and_one_group() -> None:
    def response(i: int, epoch: int, group: object) -> RecordedResponse:
        return RecordedResponse(epoch, (turn([i] * 5),), group)

    old, target, other, first, second = (
        response(0, 0, "a"), response(1, 1, "b"), response(2, 1, "c"), response(3, 1, "b"), response(4, 1, "b"),
    )  # fmt: skip
    problem = Problem(PROMPT, (old, target, other, first, second))
    for asked, expected in ((0, []), (1, [3]), (2, [3, 4]), (9, [3, 4]), (None, [3, 4])):
        case = case_at(problem, 1, 3, running=asked)
        assert case.history == (old,)
        assert [turns[0].tokens.tolist() for turns in (case.target, *case.siblings)] == [
            [i] * 3 for i in (1, *expected)
        ]
        assert case_at(problem, 1, 3, running=asked, history=False).history == ()


def test_all_sessions_advance_in_one_call_a_step_until_each_has_written_its_text() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(10, 99, length) for length in (40, 10, 70)]
    case = Case(PROMPT, (), (turn(texts[0]),), ((turn(texts[1]),), (turn(texts[2]),)))
    drafter = Recorder()
    result = follow(drafter, [case], 0.02, lambda _: None)
    sessions = [session for session, _, _ in drafter.steps[0]]
    steps = {session: sum(any(s == session for s, _, _ in step) for step in drafter.steps) for session in sessions}
    assert len(sessions) == 3
    for i, session in enumerate(sessions):
        written = [token for step in drafter.steps for s, new, _ in step if s == session for token in new]
        assert written == texts[i][: len(written)].tolist()  # the tokens of the last step are never sent
        assert len(texts[i]) - len(written) <= 17
        # No session waits and none ends early: each is in every step until its text ends.
        assert all(any(s == session for s, _, _ in step) for step in drafter.steps[: steps[session]])
    assert result.counts.tolist() == [[steps[sessions[0]], result.drafted, 40]]
    assert result.siblings[0, [0, 2]].tolist() == [steps[sessions[1]] + steps[sessions[2]], 80]
    assert sum(length for step in drafter.steps for _, _, length in step) == result.drafted + result.siblings[0, 1]
    assert result.group_tokens_a_step() == pytest.approx(120 / sum(steps.values()))


def test_what_a_sibling_wrote_in_a_step_is_drafted_from_in_the_next() -> None:
    """No token repeats within a text, so only the sibling can help, and only as far as it is ahead."""
    text = np.arange(100, 300)
    for ahead, expected in ((0, {0}), (8, set(range(1, 9))), (100, set(range(50, 101)))):
        result = score([Case(PROMPT, (), (turn(text),), ((turn(text[ahead:]),),))], 0.02, 16, lambda _: None)
        assert result.accepted in expected
        assert result.tokens_a_step() == 200 / (200 - result.accepted)


def test_a_sibling_that_has_ended_is_known_until_its_group_ends() -> None:
    text = np.arange(100, 140)
    target = (turn(np.arange(500, 600)), turn(text))  # the sibling ends long before the target writes the same
    case = Case(PROMPT, (), target, ((turn(text),),))
    assert score([case], 0.02, 16, lambda _: None).steps < 130
    assert score([Case(PROMPT, (), target)], 0.02, 16, lambda _: None).steps == 140


def test_cases_know_nothing_of_what_earlier_ones_wrote() -> None:
    drafter = Recorder()
    case = Case(PROMPT, (), (turn(np.arange(100, 150)),))
    teach(drafter, [case])
    assert follow(drafter, [case, case], 0.02, lambda _: None).counts[:, 0].tolist() == [50, 50]


class Script(Drafter):
    """Drafts what the test says, step by step."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        self._drafts = iter(drafts)

    def open(self, prompt: Tokens) -> int:
        return 0

    def step(self, sessions: Sequence[int], new: Sequence[Tokens]) -> list[Draft]:
        tokens = np.array(next(self._drafts), np.int32)
        return [Draft(tokens, np.linspace(0.9, 0.5, 5, dtype=np.float32)[: len(tokens)])]

    def ingest(self, prompt: Tokens, responses: Sequence[Tokens], epoch: int) -> None:
        pass

    def close(self, session: int) -> None:
        pass

    def sources(self) -> Sources:
        return {}


def case(*turns: Sequence[int], history: tuple[RecordedResponse, ...] = ()) -> Case:
    return Case(PROMPT, history, tuple(map(turn, turns)))


@pytest.mark.parametrize(
    ("drafts", "accepted", "counts"),
    [
        ([[], [], []], [], [3, 0, 3]),
        ([[10, 99, 12], [12]], [True, False, True], [2, 4, 3]),  # tokens after a rejection are not verified
        ([[99, 11, 12], [11, 12]], [False, True, True], [2, 5, 3]),
        ([[10, 11, 12, 13, 14]], [True, True, True], [1, 5, 3]),  # tokens beyond the text are not verified
        ([[10, 11], []], [True, True], [1, 2, 3]),
    ],
)
def test_a_token_is_verified_if_all_before_it_are_accepted(
    drafts: list[list[int]], accepted: list[bool], counts: list[int]
) -> None:
    result = follow(Script(*drafts), [case([10, 11, 12])], 0.05, lambda _: None)
    assert result.verified.accepted.tolist() == accepted
    assert len(result.verified.predicted) == len(accepted)
    assert result.counts.tolist() == [counts]


def test_the_observation_goes_with_the_probability_of_its_token() -> None:
    result = follow(Script([10, 99], [12, 13], []), [case([10, 11, 12, 99, 14])], 0.05, lambda _: None)
    assert result.verified.predicted.tolist() == pytest.approx([0.9, 0.8, 0.9, 0.8])
    assert result.verified.accepted.tolist() == [True, False, True, False]


def test_deciles_count_and_average_what_falls_into_them() -> None:
    predicted = np.array([0, 0.05, 0.15, 0.95, 1, 1], np.float32)
    accepted = np.array([False, True, True, True, True, False])
    found = deciles(Verified(predicted, accepted))
    assert [(decile.low, decile.high, decile.tokens) for decile in found] == [(0, 0.1, 2), (0.1, 0.2, 1), (0.9, 1, 3)]
    assert [decile.predicted for decile in found] == pytest.approx([0.025, 0.15, 2.95 / 3])
    assert [decile.observed for decile in found] == pytest.approx([0.5, 1, 2 / 3])
    assert deciles(Verified.none()) == []
    assert all(0 < decile.margin() < 1 for decile in found)
    assert deciles(Verified(np.full(900, 0.5, np.float32), np.arange(900) < 450))[0].margin() == pytest.approx(
        0.033, 0.05
    )


def test_the_engine_gives_every_drafted_token_a_probability() -> None:
    text = np.arange(100, 164, dtype=np.int32)
    known = RecordedResponse(0, (Turn(text, True),))
    result = score([case(text.tolist(), history=(known,))], 0.02, 16, lambda _: None)
    assert result.accepted <= len(result.verified.accepted) <= result.drafted
    assert ((result.verified.predicted > 0) & (result.verified.predicted < 1)).all()
    assert sum(decile.tokens for decile in deciles(result.verified)) == len(result.verified.accepted)
