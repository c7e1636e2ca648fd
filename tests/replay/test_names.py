"""What the names of files say: order, steps, and a name for title and plot."""

import gzip
import json
from pathlib import Path

import pytest

from histospec.replay import command as replay
from histospec.replay.recordings import names
from histospec.server import cli


def texts(epoch: int) -> list[int]:
    """Returns a response that only its epoch determines; epochs 11 and 12 are equal."""
    return [100 * min(epoch, 11) + i for i in range(60)]


def recorded(folder: Path, file: str, epochs: range = range(1, 13)) -> list[str]:
    """Writes a file per step, without a step in its records, and returns the files in the order of a shell."""
    for epoch in epochs:
        path = folder / file.format(epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"prompt": [1, i], "tokens": texts(epoch)}) + "\n" for i in range(3)))
    return sorted(str(folder / file.format(epoch)) for epoch in epochs)


def test_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    files = recorded(tmp_path, "step_{}/train_rollouts.jsonl")
    assert "step_10/" in files[1]
    found = names.in_order(files)
    assert [Path(name).parent.name for name in found] == [f"step_{epoch}" for epoch in range(1, 13)]
    assert names.order(found) == [
        "read 12 files in the order of the numbers in their names: "
        "step_1/train_rollouts.jsonl to step_12/train_rollouts.jsonl"
    ]
    assert names.in_order([files[3], "-", files[0]]) == [files[3], "-", files[0]]
    assert "in the given order" in names.order([files[3], files[0], "/dev/null"])[0]


@pytest.mark.parametrize("other", ["step_1.jsonl", "step_1.jsonl.gz", "hard.jsonl", "soft.jsonl", "./step_1.jsonl"])
def test_a_file_that_is_given_twice_is_refused(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (file,) = recorded(Path(), "step_{}.jsonl", range(1, 2))
    Path("step_1.jsonl.gz").write_bytes(gzip.compress(Path(file).read_bytes()))
    Path("hard.jsonl").hardlink_to(file)
    Path("soft.jsonl").symlink_to(file)
    assert cli.main(["replay", file, other, "--mode", "all", "--no-plot"]) == 2
    told = capsys.readouterr().err
    assert "is the same recording as" in told
    assert file in told
    assert other in told
    assert told.count("\n") == 1


def test_files_of_the_same_name_in_other_folders_are_read(tmp_path: Path) -> None:
    names.each_once([*recorded(tmp_path, "step_{}/a.jsonl"), "-", "-"])


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("rollouts/step_12/train_rollouts.jsonl", 12),
        ("dumped_evals/global_step_5_evals/gsm8k.jsonl", 5),
        ("logs/train_data_step3.jsonl.gz", 3),
        ("iter_0000010/rank_3.jsonl", 10),
        ("iteration-4.jsonl", 4),
        ("epoch=2.parquet", 2),
        ("step_3/step_4.jsonl", 4),
        ("step_3/rank_1/rollouts.jsonl", 3),
        ("7.jsonl", None),
        ("rank_3.jsonl", None),
        ("timestep_3.jsonl", None),
        ("epoch_1/step_3.jsonl", None),
        ("epoch_1_step_3.jsonl", None),
        ("steps_3_and_step_4_and_step_5.jsonl", None),
    ],
)
def test_a_step_is_taken_where_it_is_clear(name: str, step: int | None) -> None:
    assert names.step(f"/data/{name}") == step


@pytest.mark.parametrize(
    ("files", "steps"),
    [
        (["qwen-step1/rollouts/a.jsonl", "qwen-step1/rollouts/b.jsonl"], [None, None]),
        (["qwen-step1/step_3/a.jsonl", "qwen-step1/step_4/a.jsonl", "qwen-step1/b.jsonl"], [3, 4, None]),
        (["run/step_3/rank_0.jsonl", "run/step_3/rank_1.jsonl", "run/step_4/rank_0.jsonl"], [3, 3, 4]),
        (["run/step_3_a.jsonl", "run/step_3_b.jsonl"], [3, 3]),
        (["epoch_1/step_3.jsonl", "epoch_1/step_4.jsonl"], [3, 4]),
        (["epoch_1/step_3.jsonl", "epoch_2/step_3.jsonl"], [None, None]),
        (["run/step_3.jsonl"], [None]),
    ],
)
def test_a_folder_of_all_files_tells_no_step(files: list[str], steps: list[int | None]) -> None:
    assert names.steps(files) == steps
    assert names.steps([f"/data/global_step_7/{name}" for name in files]) == steps


def test_groups_are_visits_in_a_folder_with_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        file = tmp_path / "qwen-step1" / "rollouts" / f"{i}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": [1], "tokens": texts(1), "group": i}) + "\n")
    assert replay.main([*map(str, file.parent.iterdir()), "--no-plot", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["problems_with_history"] == 1
    assert "each group is a visit" in figures["notes"][1]


@pytest.mark.parametrize("file", ["step_{}/train_rollouts.jsonl", "rollouts_step{}.jsonl"])
def test_the_step_in_the_names_is_the_epoch_whatever_the_order_of_the_arguments(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = recorded(tmp_path, file)
    figures = []
    for arguments in (files, files[::-1]):
        assert replay.main([*arguments, "--cost", "0.05", "--no-plot", "--json", "-"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1]
    assert [epoch["epoch"] for epoch in figures[0]["epochs"]] == list(range(3, 13))
    assert figures[0]["last_visit"]["costs"][0]["tokens_per_step"] > 3  # the history has this text since step 11
    assert "epochs: the step in the files' names" in figures[0]["notes"][1]


def test_a_step_beside_epochs_in_the_records_is_no_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 6):
        record = {"prompt": [1], "tokens": texts(1), "epoch": step + 100}
        (tmp_path / f"step_{step}.jsonl").write_text(json.dumps(record) + "\n")
    assert replay.main([*map(str, tmp_path.iterdir()), "--no-plot", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [epoch["epoch"] for epoch in figures["epochs"]] == [106]
    assert "epochs: the field epoch" in figures["notes"][1]


def test_title_and_plot_of_several_files_have_the_name_of_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    files = recorded(tmp_path / "math-7b", "step_{}/train_rollouts.jsonl", range(1, 4))
    assert replay.main([*files, "--json", "figures.json"]) == 0
    assert "math-7b (3 files): 3 of 3 problems" in capsys.readouterr().out
    assert (tmp_path / "math-7b.replay.png").exists()
    assert json.loads((tmp_path / "figures.json").read_text())["file"] == "math-7b (3 files)"
    assert names.called(["a/rollouts.jsonl.gz"]) == "rollouts"
    assert names.called(["/a.jsonl", "/b.jsonl"]) == "recordings"
