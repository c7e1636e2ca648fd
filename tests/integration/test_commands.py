"""The documented commands: the demo and the benchmarks, at a small size."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Returns the command's result, with only these HISTOSPEC_ variables; fails with its output.

    pytest's limit ends a command that hangs.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")} | {"OMP_NUM_THREADS": "1"}
    environment["HISTOSPEC_DEADLINE"] = "5"  # seconds: late drafts on a busy machine are not the demo's fault
    environment |= variables
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.vllm
@pytest.mark.timeout(1800)  # the demo needs 70 CPU seconds; `make test` gives it a fifth of a core
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs a vLLM build in the environment")
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    done = run("-m", "examples.tiny_rl.run", "--quick", "--epochs", "2", "--out", tmp_path)
    results = json.loads((tmp_path / "tiny_rl.json").read_text())
    first, *later = results["epochs"]
    assert first["problem_lookups"]["hit"] == 0
    assert first["problem_lookups"]["miss"] > 0
    for epoch in later:
        assert epoch["problem_lookups"] == {"hit": first["problem_lookups"]["miss"], "miss": 0}
        assert epoch["fewer_steps"] >= 1.3
        assert epoch["with_drafts"]["tokens_per_step"] > first["with_drafts"]["tokens_per_step"]
    assert (tmp_path / "tiny_rl.png").stat().st_size > 10_000
    assert "hit rate" in done.stdout


@pytest.mark.vllm
@pytest.mark.newest
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs a vLLM build in the environment")
def test_the_demo_says_what_history_and_a_draft_model_gained(tmp_path: Path) -> None:
    """The draft model's part of the accepted drafts is largest in the first epoch, which has no history."""
    fixed = {"HISTOSPEC_VERIFY_COST": "0.05", "HISTOSPEC_MODEL_DRAFT_TOKENS": "3"}  # independent of any clock
    done = run("-m", "examples.tiny_rl.run", "--quick", "--epochs", "2", "--drafter", "--out", tmp_path, **fixed)
    first, *later = (epoch["with_drafts"] for epoch in json.loads((tmp_path / "tiny_rl.json").read_text())["epochs"])
    assert first["tokens_per_step"] > 3  # history alone yields 1.8 there
    for epoch in (first, *later):
        history, model = epoch["history"]["accepted"], epoch["accepted"] - epoch["history"]["accepted"]
        assert 0 < epoch["history"]["drafted"] < epoch["drafted"]
        assert 0 < model <= epoch["drafted"] - epoch["history"]["drafted"]
        if epoch is not first:
            assert model < history
            assert model / epoch["accepted"] < 1 - first["history"]["accepted"] / first["accepted"]
    assert "drafter" in done.stdout


def test_the_engine_benchmark_runs() -> None:
    done = run("-m", "benchmarks.engine.compare", "--quick")
    assert "ingest" in done.stdout
