"""`histospec replay --compare arctic`: Arctic on the same cases, or an error that says how to install it."""

import json
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from histospec.replay import arctic as replay_arctic
from histospec.replay import command as replay

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
installed = pytest.mark.skipif(util.find_spec("arctic_inference") is None, reason="arctic-inference is not installed")


def test_a_missing_package_is_named_before_anything_is_read(tmp_path: Path) -> None:
    """Hides arctic_inference from the interpreter."""
    program = (
        "import sys; sys.modules['arctic_inference'] = None\n"
        "from histospec.server.cli import main\n"
        f"sys.exit(main(['replay', {str(tmp_path / 'absent.jsonl')!r}, '--compare', 'arctic']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "--compare arctic: the package arctic-inference is not installed" in result.stderr
    assert "Traceback" not in result.stderr


@installed
def test_each_cost_is_judged_by_the_best_setting_at_that_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(10, 1000, 100)
    responses = [
        {"epoch": epoch, "tokens": np.where(rng.random(100) < 0.1, 7, text).tolist()} for epoch in (0, 0, 0, 1)
    ]
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps({"prompt": [1, 2, 3], "responses": responses}) + "\n")
    assert replay.main([str(file), "--compare", "arctic", "--no-plot", "--json", "-", "--cost", "0,0.05,2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    costs = figures["compare"]["arctic"]["costs"]
    assert [entry["verify_cost"] for entry in costs] == [0, 0.05, 2]
    assert costs[0]["speed_up"] == costs[0]["tokens_per_step"] >= costs[2]["tokens_per_step"] > 1
    for ours, theirs in zip(figures["last_visit"]["costs"], costs, strict=True):
        assert theirs["gain"] == pytest.approx(ours["speed_up"] / theirs["speed_up"] - 1)
        assert replay_arctic.Settings(**theirs["settings"]) in replay_arctic.GRID


@installed
@pytest.mark.skipif(not (SHARED / "lab" / "replay.py").exists(), reason="the reference harness is not here")
@pytest.mark.parametrize(("name", "problems"), [("text_creative_gpt4", 6), ("agent_tau_airline", 2)])
def test_the_peer_scores_as_in_the_reference_harness(
    name: str, problems: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(SHARED / "rollouts" / f"{name}.jsonl.gz")
    command = [sys.executable, str(SHARED / "lab" / "replay.py"), file, "arctic", "--limit", str(problems)]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    expected = re.findall(r"S@([\d.]+) ([\d.]+)", report.splitlines()[-1])

    options = ["--compare", "arctic", "--limit", str(problems), "--epochs", "0", "--no-plot", "--json", "-"]
    assert replay.main([file, *options]) == 0
    costs = json.loads(capsys.readouterr().out)["compare"]["arctic"]["costs"]
    assert [(str(entry["verify_cost"]), f"{entry['speed_up']:.3f}") for entry in costs] == expected
