"""The example that starts prompts with long responses first."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from examples.longest_first import follow, longest_first, makespan
from histospec.client import DraftClient, LengthPrediction
from histospec.replay.recordings import Problem, RecordedResponse, Turn
from tests.support.servers import Server

ROOT = Path(__file__).parents[2]
SHORT, LONG = [4, 5, 6, 5], [5, 60, 6, 5]
"""Lengths of the responses to a prompt: one of the long ones is late."""


def problem(number: int, *epochs: list[int]) -> Problem:
    responses = (
        RecordedResponse(epoch, (Turn(np.arange(length, dtype=np.int32), True),))
        for epoch, lengths in enumerate(epochs)
        for length in lengths
    )
    return Problem(np.array([7, number], np.int32), tuple(responses))


def test_order_and_time() -> None:
    def expects(*lengths: float) -> LengthPrediction:
        return LengthPrediction(np.array([0.9]), np.array(lengths), len(lengths))

    assert longest_first([expects(3), expects(9), None, expects(), expects(5)]) == [2, 3, 1, 4, 0]
    assert makespan([1, 1, 1, 1, 9], 2) == 11
    assert makespan([9, 1, 1, 1, 1], 2) == 9
    assert makespan([], 2) == 0


def test_the_history_knows_the_long_ones(shared_server: Server) -> None:
    """The recording starts them last. From the second epoch on, they start first."""
    problems = [*(problem(n, SHORT, SHORT, SHORT) for n in range(6)), *(problem(n, LONG, LONG, LONG) for n in (6, 7))]
    with DraftClient(shared_server.endpoint, "lengths") as client:
        times = follow(client, problems, slots=4)
    assert [time.epoch for time in times] == [1, 2]
    assert {(time.as_recorded, time.expected, time.known) for time in times} == {(97, 70, 70)}


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    rows = [
        {"prompt": [n, 1], "responses": [{"epoch": e, "tokens": [5] * (9 if n else 90)} for e in (0, 1)]}
        for n in (1, 2, 3, 0)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [sys.executable, "-m", "examples.longest_first", str(file), "--slots", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["epoch  expected  known", "    1      0.91   0.91", " mean      0.91   0.91"]
    refused = subprocess.run([*command, "--slots", "0"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--slots: is 0, must be at least 1" in refused.stderr
