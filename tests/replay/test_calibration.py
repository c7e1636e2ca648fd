"""The calibration of a replay: which draft tokens count as observations, and the deciles."""

from collections.abc import Sequence

import numpy as np
import pytest

from histospec.replay.calibration import Verified, deciles
from histospec.replay.cases import Case
from histospec.replay.drafters import Draft, Drafter, Sources
from histospec.replay.recordings import RecordedResponse, Tokens, Turn
from histospec.replay.scores import follow, score

PROMPT = np.array([1, 2], np.int32)


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
    return Case(PROMPT, history, tuple(Turn(np.array(turn, np.int32), True) for turn in turns))


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
