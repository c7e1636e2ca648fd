"""The arithmetic and the bookkeeping of benchmarks/gpu/run.py; its measurements need vLLM."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.cost import marginal_cost, verify_cost
from benchmarks.gpu.overhead import METHODS
from benchmarks.gpu.results import Results


def test_verify_cost_is_in_plain_steps_a_drafted_token() -> None:
    seconds = {0: 0.011, 1: 0.012, 4: 0.015, 16: 0.047}
    costs = verify_cost(seconds, plain=0.010)
    assert costs == pytest.approx({1: 0.1, 4: 0.1, 16: 0.225})
    marginal = marginal_cost(seconds, plain=0.010)
    assert marginal == pytest.approx({1: 0.1, 4: 0.1, 16: 3.2 / 12})


def test_the_order_of_the_lengths_does_not_matter() -> None:
    seconds = {16: 0.05, 0: 0.01, 2: 0.02}
    ordered = dict(sorted(seconds.items()))
    assert marginal_cost(seconds, 0.01) == marginal_cost(ordered, 0.01)
    assert verify_cost(seconds, 0.01) == verify_cost(ordered, 0.01)


def test_results_are_kept_measurement_by_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.results.machine", lambda: "a machine")
    results = Results(tmp_path, "cost", dry=True)
    results.add({"model": "toy", "batch": 2}, {"seconds": 1.0})
    results.add({"model": "toy", "batch": 4}, {"seconds": 2.0})
    results.add({"model": "toy", "batch": 2}, {"seconds": 3.0})  # measured again
    again = Results(tmp_path, "cost", dry=True)
    assert again.find(model="toy", batch=2) == {"model": "toy", "batch": 2, "seconds": 3.0, "machine": "a machine"}
    assert len(again.rows) == 2
    assert again.has(batch=4)
    assert not again.has(batch=8)
    assert json.loads((tmp_path / "cost.json").read_text())["part"] == "cost"


def test_a_dry_run_is_not_mixed_with_a_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.results.machine", lambda: "a machine")
    Results(tmp_path, "cost", dry=True).add({"batch": 2}, {"seconds": 1.0})
    with pytest.raises(ValueError, match=r"cost\.json: made with --dry"):
        Results(tmp_path, "cost", dry=False)


@pytest.mark.parametrize(
    ("method", "runner", "asynchronous", "ignored"),
    [
        ("HistoSpec, async, cost 1, V2", "V2", True, ""),
        ("HistoSpec, async, cost 1, V2", "V2", False, "vLLM turned asynchronous scheduling off"),
        ("HistoSpec, cost 1, V2", "V1", False, "vLLM chose model runner V1"),
        ("HistoSpec, cost 1, V1", "V1", False, ""),
        ("none", "V2", False, ""),
    ],
)
def test_a_row_whose_setting_vllm_ignored_is_left_out(
    method: str, runner: str, asynchronous: bool, ignored: str
) -> None:
    settings = {"model_runner": runner, "async_scheduling": asynchronous}
    assert METHODS[method].ignored(settings) == ignored
