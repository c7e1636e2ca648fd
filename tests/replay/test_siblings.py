"""`histospec replay --siblings`: the sessions of a group run in step."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from histospec.replay import command as replay
from histospec.replay.cases import Case, group_at
from histospec.replay.drafters import Draft, EngineDrafter
from histospec.replay.recordings import Problem, RecordedResponse, Tokens, Turn
from histospec.replay.scores import follow, score, teach

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
        case = group_at(problem, 1, siblings=asked, history=True, max_response=3)
        assert case.history == (old,)
        assert [turns[0].tokens.tolist() for turns in (case.target, *case.siblings)] == [
            [i] * 3 for i in (1, *expected)
        ]
        assert group_at(problem, 1, siblings=asked, history=False, max_response=3).history == ()


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


def recorded(path: Path) -> Path:
    """Three problems, two epochs; the groups of the last have 4, 4 and 2 members."""
    rng = np.random.default_rng(0)
    lines = []
    for i, size in enumerate((4, 4, 2)):
        text = rng.integers(10, 1000, 80)
        responses = []
        for epoch, group in ((0, 2), (1, size)):
            for _ in range(group):
                changed = np.where(rng.random(len(text)) < 0.1, rng.integers(10, 1000, len(text)), text)
                responses.append({"epoch": epoch, "group": epoch, "tokens": changed.tolist()})
        lines.append(json.dumps({"prompt": [1, 2, i + 3], "responses": responses}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_table_has_a_row_for_each_number_of_siblings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recorded(tmp_path / "rollouts.jsonl")
    arguments = [file, "--siblings", "0,1", "--siblings", "15,all", "--cost", 0.05]
    written = ["--json", tmp_path / "figures.json", "--plot", tmp_path / "plot.png"]
    assert replay.main(list(map(str, arguments + written))) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = figures["siblings"]
    assert [(row["siblings"], row["history"]) for row in rows] == [
        (asked, history) for history in (False, True) for asked in (0, 1, 15, "all")
    ]
    assert [row["running"] for row in rows[:4]] == [0, 1, pytest.approx(7 / 3), pytest.approx(7 / 3)]
    assert "3 of 3 groups have fewer than 15 siblings" in out
    for row in rows:
        (entry,) = row["costs"]
        assert entry["tokens_per_step"] == 240 / entry["steps"]
        assert f"{entry['tokens_per_step']:.3f}" in out
        assert f"{entry['speed_up']:.3f}" in out
    # Without siblings, a group with history equals the headline's case.
    assert rows[4]["costs"][0]["steps"] == figures["last_visit"]["costs"][0]["steps"]
    assert rows[0]["costs"][0]["tokens_per_step"] < rows[4]["costs"][0]["tokens_per_step"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("flag", "history"), [("--history", True), ("--no-history", False)])
def test_half_of_the_table_can_be_chosen(
    flag: str, history: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(tmp_path / "rollouts.jsonl")
    arguments = [str(file), "--siblings", "1", flag, "--cost", "0.05", "--plot", str(tmp_path / "plot.png")]
    assert replay.main([*arguments, "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["siblings"]
    assert row["history"] is history
