"""`histospec replay`: its rules on small recordings, its output, and agreement with an independent harness."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from histospec.replay import command as replay
from histospec.replay import plan as replay_plan
from histospec.replay import plot as replay_plot
from histospec.replay import tables as replay_tables
from histospec.replay.plan import case_at
from histospec.replay.recordings import Problem, RecordedResponse, Turn, read
from histospec.replay.result import Options, as_json
from histospec.replay.scores import Score, score
from histospec.server import cli

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
RECORDINGS = ["math_rlckpt_llama3b", "agent_tau_airline", "code_humaneval_codegen", "text_creative_gpt4"]
COSTS = (0.02, 0.05, 0.1)


def turn(tokens: object, generated: bool = True) -> Turn:
    return Turn(np.array(tokens, np.int32), generated)


def response(epoch: int, *turns: Turn) -> RecordedResponse:
    return RecordedResponse(epoch, turns)


def recorded(path: Path, groups: Sequence[Sequence[int]] = ((2, 2, 2),) * 6) -> Path:
    """Returns a small recording: responses to a problem are one text with a few changed tokens.

    `groups`: for each problem, the number of responses in each epoch.
    """
    rng = np.random.default_rng(0)
    lines = []
    for i, sizes in enumerate(groups):
        text = rng.integers(10, 1000, 120)
        responses = []
        for epoch in (epoch for epoch, size in enumerate(sizes) for _ in range(size)):
            changed = np.where(rng.random(len(text)) < 0.05, rng.integers(10, 1000, len(text)), text)
            responses.append({"epoch": epoch, "group": epoch, "tokens": changed.tolist()})
        lines.append(json.dumps({"id": i, "prompt": [1, 2, i + 3], "responses": responses}))
    path.write_text("\n".join(lines) + "\n")
    return path


def figures(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert replay.main([*map(str, arguments), "--json", "-", "--no-plot"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_case_knows_only_what_came_before_it() -> None:
    a, b, c, d = (response(epoch, turn([i])) for i, epoch in enumerate((0, 1, 1, 2)))
    problem = Problem(np.array([9], np.int32), (a, b, c, d))
    assert case_at(problem, 0, 9).history == ()
    hist, both = (case_at(problem, 1, 9, finished=finished) for finished in (False, True))
    assert hist.history == (a,)
    assert both.history == (a, c)
    assert hist.target == both.target == b.turns


def test_a_repeated_response_is_drafted_and_every_step_counts() -> None:
    text = turn(np.arange(100, 164))
    problem = Problem(np.array([1, 2, 3], np.int32), (response(0, text), response(1, text)))
    result = score([case_at(problem, 1, 2000)], 0.02, 16, lambda _: None)
    assert result.tokens == 64
    assert 64 / 17 <= result.steps < 32  # a step yields at most 16 draft tokens and one more
    assert result.accepted == 64 - result.steps <= result.drafted


def test_what_the_environment_wrote_costs_no_step_and_is_no_gain() -> None:
    known = response(0, turn(np.arange(100, 132)))
    asked = response(1, turn(np.arange(500, 900), generated=False), turn([7]), turn([8, 9], generated=False))
    problem = Problem(np.array([1], np.int32), (known, asked))
    assert (score([case_at(problem, 1, 2000)], 0.05, 16, lambda _: None).counts[0, [0, 2]] == [1, 1]).all()


def test_s_c_charges_for_drafted_tokens() -> None:
    result = Score(0.1, np.array([[10, 40, 30], [10, 0, 10], [0, 0, 0]]))
    assert result.speed_up() == pytest.approx(40 / (20 + 4))
    assert result.speed_up(0) == 2
    assert result.speed_ups() == pytest.approx([30 / 14, 1])
    low, high = result.interval()
    assert low <= result.speed_up() <= high


def test_epochs_are_scored_one_by_one_and_the_last_is_the_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(tmp_path / "rollouts.jsonl")
    result = figures(capsys, file, "--cost", 0.05, "--cost", 0.2)
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2]
    assert [epoch["history_tokens"] for epoch in result["epochs"]] == [6 * 2 * 120, 6 * 4 * 120]
    assert {key: value for key, value in result["epochs"][-1].items() if key != "epoch"} == result["last_visit"]
    assert [score["verify_cost"] for score in result["last_visit"]["costs"]] == [0.05, 0.2]
    assert result["problems"] == result["problems_with_history"] == 6

    siblings = figures(capsys, file, "--mode", "all", "--limit", 4, "--epochs", 2)
    assert [epoch["epoch"] for epoch in siblings["epochs"]] == [1, 2]
    assert siblings["last_visit"]["history_tokens"] == 4 * 5 * 120
    assert figures(capsys, file, "--mode", "all", "--epochs", 0)["epochs"] == []


def test_problems_last_visited_at_different_epochs_have_a_headline_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = figures(capsys, recorded(tmp_path / "rollouts.jsonl", groups=((2, 2, 2), (2, 2))))
    assert result["last_visit"]["problems"] == 2
    assert result["last_visit"]["history_tokens"] == (4 + 2) * 120
    assert [(epoch["epoch"], epoch["problems"]) for epoch in result["epochs"]] == [(1, 2), (2, 1)]


def test_table_plot_and_json_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = recorded(tmp_path / "rollouts.jsonl")
    assert replay.main([str(file), "--json", "figures.json"]) == 0
    table = capsys.readouterr().out
    result = json.loads((tmp_path / "figures.json").read_text())
    for entry in result["last_visit"]["costs"]:
        assert f"{entry['speed_up']:.3f}" in table
        assert f"{entry['tokens_per_step']:.3f}" in table
    assert (tmp_path / "rollouts.replay.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_tables_are_the_same_and_the_plot_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = recorded(tmp_path / "rollouts.jsonl")
    assert cli.main(["replay", str(file), "--no-plot"]) == 0
    tables = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert cli.main(["replay", str(file)]) == 0
    missing = 'a plot needs matplotlib: pip install "histospec[replay]"'
    assert capsys.readouterr().out == f"{tables}no plot: {missing}\n"
    assert cli.main(["replay", str(file), "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == f"histospec replay: --plot x.png: {missing}\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_bad_file_ends_with_a_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"prompt": [1], "responses": [{"epoch": 0, "tokens": [1, -5]}]}\n')
    assert cli.main(["replay", str(file)]) == 2
    assert f"{file}: line 1: responses[0].tokens[1]: -5 is below the limit 0" in capsys.readouterr().err
    file.write_text('{"prompt": [1], "responses": [{"epoch": 0, "tokens": [1]}, {"epoch": 0, "tokens": [2]}]}\n')
    assert cli.main(["replay", str(file)]) == 2
    assert "at least two epochs" in capsys.readouterr().err
    assert cli.main(["replay", str(file), "--mode", "all", "--no-plot"]) == 0
    assert cli.main(["replay", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a directory; give its files, such as {tmp_path}/*.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--cost", "-1"], ["--cost", "nan"], ["--limit", "-1"], ["--max-tokens", "0"], ["--mode", "twin"]]
)
def test_options_outside_their_limits_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "rollouts.jsonl", *arguments]) == 2
    text = capsys.readouterr().err
    assert arguments[0] in text
    assert text.count("\n") == 1


def test_a_sweep_of_costs_details_three_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recorded(tmp_path / "rollouts.jsonl")
    plot = tmp_path / "sweep.png"
    result = tmp_path / "sweep.json"
    arguments = ["--verify-cost", "0.1,0.01,0.02,0.05", "--cost", "0.2,0.1", "--json", result, "--plot", plot]
    assert replay.main([*map(str, [file, *arguments])]) == 0
    figures = json.loads(result.read_text())
    assert [entry["verify_cost"] for entry in figures["last_visit"]["costs"]] == [0.1, 0.01, 0.02, 0.05, 0.2]
    assert [entry["verify_cost"] for entry in figures["epochs"][0]["costs"]] == [0.01, 0.05, 0.2]
    assert "c = 0.02" not in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_sources_contributed_is_shown_where_the_engine_says_it(tmp_path: Path) -> None:
    options = Options("hist", 0, 1, (0.05,), 16, 2000, 0)
    with Progress(disable=True) as progress, recorded(tmp_path / "rollouts.jsonl").open("rb") as file:
        result = replay_plan.replay(list(read(file)), options, progress)
    (score,) = result.last.scores
    sources = {
        "history": {"draft_tokens": score.steps * 2, "accepted_tokens": score.steps},
        "siblings": {"draft_tokens": 0, "accepted_tokens": 0},
    }
    for known in ({}, sources):
        result = replace(result, last=replace(result.last, scores=(replace(score, sources=known),)))
        console = Console(record=True, width=100, file=io.StringIO())
        console.print(replay_tables.report(result, options, "rollouts"))
        text = console.export_text()
        figures = as_json(result, options, "rollouts.jsonl")["last_visit"]["costs"][0]
        axes = replay_plot.plot(result, options, "rollouts").axes
        assert ("Contribution of each source" in text) == bool(known)
        assert figures.get("sources", {}) == known
        assert len(axes) == (6 if known else 5)
    assert re.search(r"0.05 +history +2.000 +100% +1.000 +100% +50% *\n +siblings +0.000 +0% +0.000 +0% +- *\n", text)


def test_the_table_has_a_row_for_each_number_of_siblings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recorded(tmp_path / "rollouts.jsonl", groups=((2, 4), (2, 4), (2, 2)))
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
        assert entry["tokens_per_step"] == 360 / entry["steps"]
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
    file = recorded(tmp_path / "rollouts.jsonl", groups=((2, 4), (2, 4), (2, 2)))
    arguments = [str(file), "--siblings", "1", flag, "--cost", "0.05", "--plot", str(tmp_path / "plot.png")]
    assert replay.main([*arguments, "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["siblings"]
    assert row["history"] is history


@pytest.mark.skipif(not (SHARED / "lab" / "replay.py").exists(), reason="the reference harness is not here")
@pytest.mark.parametrize("mode", ["hist", "all"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_figures_agree_with_the_reference_harness(name: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both replay the same cases with the same engine: every printed figure agrees to the third digit."""
    file = SHARED / "rollouts" / f"{name}.jsonl.gz"
    harness = str(SHARED / "lab" / "replay.py")
    command = [sys.executable, harness, str(file), "histospec", "--mode", mode, "--limit", "8"]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    number = r"([\d.]+)"
    line = rf"'verify_cost': {number}}} tokens/step {number} drafted/step {number} " + " ".join(
        rf"S@{cost} {number}" for cost in COSTS
    )
    expected = re.findall(line, report)

    result = figures(capsys, file, "--mode", mode, "--limit", 8, "--epochs", 0)
    ours = [
        (
            str(entry["verify_cost"]),
            f"{entry['tokens_per_step']:.3f}",
            f"{entry['drafted_per_step']:.3f}",
            *(f"{entry['speed_up_at'][str(cost)]:.3f}" for cost in COSTS),
        )
        for entry in result["last_visit"]["costs"]
    ]
    assert len(expected) == len(COSTS)
    assert ours == expected
    assert f"history tokens {result['last_visit']['history_tokens']}" in report
    assert f"target tokens {result['last_visit']['target_tokens']}" in report
