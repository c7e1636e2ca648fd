"""The study's arithmetic, on runs whose numbers are known."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rl_study import headline, overlap, runs, tables
from benchmarks.rl_study.methods import METHODS

ROOT = Path(__file__).parents[2]


def test_overlap() -> None:
    assert overlap.rouge_1([1, 2, 3], [3, 2, 1]) == 1
    assert overlap.rouge_1([1, 1, 2, 2], [1, 2]) == pytest.approx(2 * 2 / 6)
    assert overlap.rouge_1([], []) == 0
    assert overlap.common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert overlap.common_prefix([], [1]) == 0


def test_mean_is_student_s() -> None:
    # Three values around 2 with a standard deviation of 1; t(0.975, 2) is 4.303.
    middle, half = runs.mean([1, 2, 3])
    assert middle == 2
    assert half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert math.isnan(runs.mean([1, 2])[1])


def epoch(number: int, steps: int, reused: int, seconds: float) -> dict[str, Any]:
    return {
        "epoch": number, "reward": number / 10, "tokens": 100, "generated": 100 - reused, "reused": reused,
        "steps": steps, "engine_steps": steps, "drafted": 2 * reused, "accepted": reused,
        "rouge_1": None if number == 1 else 0.5, "prefix": None if number == 1 else 0.25,
        "alike": 0.75,
        "seconds": dict.fromkeys(tables.PARTS, seconds),
    }  # fmt: skip


def study(folder: Path, made: dict[str, list[tuple[int, int, float]]]) -> Any:
    """Runs of methods, of which each epoch is given, as `runs` reads them."""
    for name, rows in made.items():
        records = [
            *(epoch(number, *row) for number, row in enumerate(rows, 1)),
            {"held_out": 0.75},
            {"server_seconds": 1.5},
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        runs.file_of(folder, name, 1).write_bytes(gzip.compress(text.encode()))
    return runs.load(folder, METHODS)


def test_tables_leave_the_first_epoch_out(tmp_path: Path) -> None:
    """Nothing can be reused in it, or drafted from history."""
    made = {"none": [(100, 0, 4.0)] * 3, "SPEC-RL 1": [(100, 0, 4.0), (20, 60, 1.0), (30, 40, 1.0)]}
    found = study(tmp_path, made)
    assert list(found) == ["none", "SPEC-RL 1"]
    work = [cell.strip() for cell in tables.work(found).splitlines()[3].split("|")[1:-1]]
    assert work == ["SPEC-RL 1", "1", "0.1", "4.00x", "0.1", "2.00x", "50%", "50%", "0.200", "0.200", "0.750", "0.50"]
    time = [cell.strip() for cell in tables.time(found).splitlines()[3].split("|")[1:-1]]
    # Of nothing's rollout of 4 s an epoch, 1 s of verification, 1 of rollout, 1 of assembly are left.
    assert time == ["SPEC-RL 1", *["2.0"] * 5, "10.0", "1.33x", "1.5"]


def test_repetition_is_beside_independent_draws(tmp_path: Path) -> None:
    made = {"HistoSpec": [(100, 0, 1.0), (60, 0, 1.0)], "coupled 0.5": [(100, 0, 1.0), (20, 0, 1.0)]}
    found = study(tmp_path, made)
    cells = [cell.strip() for cell in tables.repetition(found).splitlines()[3].split("|")[1:-1]]
    assert cells == ["coupled 0.5", "0.0", "3.00x", "0.25", "0.50", "0.75", "0.150", "0.150", "0.750"]


def test_drafters_are_compared_epoch_by_epoch(tmp_path: Path) -> None:
    """100 tokens an epoch: 50, 40 and 20 steps are 2, 2.5 and 5 tokens a step; 4 ms are 40 microseconds a token."""
    made = {"none": [(100, 0, 0.01)] * 3, "drafter": [(50, 0, 0.004), (40, 0, 0.002), (20, 0, 0.004)]}
    found = study(tmp_path, made)
    head, _, plain, drafter = tables.by_epoch(found).splitlines()
    assert head.count("tokens per step") == head.count("µs") == 4  # epochs 1, 2 and 3, and the mean
    assert [cell.strip() for cell in plain.split("|")[1:-1]] == ["none", *["1.00"] * 4, *["100"] * 4]
    assert [cell.strip() for cell in drafter.split("|")[1:-1]] == [
        "drafter", "2.00", "2.50", "5.00", "3.75", "40", "20", "40", "30",
    ]  # fmt: skip
    assert tables.by_epoch(found) in tables.text(found)
    assert tables.by_epoch({"none": found["none"]}) not in tables.text({"none": found["none"]})


def test_the_page_says_what_its_runs_say() -> None:
    found = runs.load(ROOT / "benchmarks/rl_study/recorded", METHODS)
    assert tables.text(found) in (ROOT / "docs/study.md").read_text()


def test_the_headline_is_of_all_epochs(tmp_path: Path) -> None:
    """300 tokens: in 300 steps without drafts, and in 150, of 90 ms of CPU time, with them."""
    made = {"none": [(100, 0, 0.04)] * 3, "HistoSpec auto": [(90, 0, 0.03), (40, 0, 0.03), (20, 0, 0.03)]}
    found = study(tmp_path, made)
    _, _, plain, drafting = (
        [cell.strip() for cell in row.split("|")[1:-1]] for row in headline.methods(found).splitlines()
    )
    assert plain == ["nothing", "1.00", "300", "", "0.1", "", "0.200", "0.750"]
    assert drafting == ["HistoSpec", "2.00", "150", "", "0.1", "1.5", "0.200", "0.750"]
    everything = dict.fromkeys(headline.NAMES, found["HistoSpec auto"]) | {"none": found["none"]}
    rows = headline.costs({1: everything, 64: everything}).splitlines()[2:]
    assert rows[:4] == [
        f"| nothing | {number} | {epochs} | 1.00 | 0.0 | 0.4 ms | 400 µs |"
        for number in (1, 64)
        for epochs in ("1", "2 to 3")
    ]
    assert rows[12:14] == [
        "| HistoSpec | 1 | 1 | 1.11 | 0.0 | 0.3 ms | 300 µs |",
        "| HistoSpec | 1 | 2 to 3 | 3.33 | 0.0 | 1.0 ms | 300 µs |",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/study-defaults.md"])
def test_the_headline_of_a_page_is_of_the_recorded_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    headline.main([])
    _, _, rest = (ROOT / page).read_text().partition(tables.BEGIN)
    shown, end, _ = rest.partition(tables.END)
    assert end
    assert shown.strip()
    assert shown.strip() in capsys.readouterr().out


def test_only_the_tables_of_a_page_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.insert("new\n", page)
    assert page.read_text() == f"before\n{tables.BEGIN}\nnew\n{tables.END}\nafter\n"
