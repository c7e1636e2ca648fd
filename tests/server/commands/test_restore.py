"""Restores a snapshot to a running server: whole or not at all, through pipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.commands.conftest import Run
from tests.support.batches import put
from tests.support.contents import on_disk, restorable, tokens
from tests.support.exports import export, problems
from tests.support.servers import Server, Starter
from tests.support.wires import Connector


def test_restored_responses_obey_the_window(
    run: Run, tmp_path: Path, start_server: Starter, connect: Connector
) -> None:
    store = on_disk(tmp_path)
    for epoch in range(8):
        put(store, tokens(epoch), epoch)
    store.close()
    server = start_server("--history-epochs", "2")
    run("snapshot", tmp_path / "all.jsonl", "--data-dir", tmp_path / "data")
    run("restore", tmp_path / "all.jsonl", "--to", server.endpoint)
    (records,) = problems(export(connect(server.endpoint).stub)).values()
    assert [record.epoch for record in records] == [6, 7]


GOOD = {"namespace": "run", "prompt": [1], "responses": [{"epoch": 0, "tokens": [1, 2]}]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({k: v for k, v in GOOD.items() if k != "namespace"}, "namespace: missing"),
        ({**GOOD, "namespace": ""}, "namespace: "),
        ({**GOOD, "namespace": "x" * 129}, "namespace: "),
        ({**GOOD, "id": 3}, "id: should be a valid string, is 3"),
        ({**GOOD, "estimator": "!"}, "estimator: should be base64"),
        ({**GOOD, "responses": [{"epoch": 0, "tokens": [1], "reward": "x"}]}, "responses[0].reward: should be"),
        ({**GOOD, "responses": [{"epoch": 0, "tokens": [1], "logprobs": [0.5, 1]}]}, "responses[0]: has 2 logprobs"),
        ({**GOOD, "responses": [{"epoch": 0, "tokens": [1], "seed": 2**63}]}, f"responses[0].seed: {2**63} is above"),
        ({**GOOD, "responses": [{"epoch": 0, "tokens": [1], "seed": 0.5}]}, "responses[0].seed: should be a valid int"),
        (
            {**GOOD, "responses": [{"epoch": 0, "tokens": [1], "alternatives": "!"}]},
            "responses[0].alternatives: should",
        ),
        (
            {**GOOD, "responses": [{"epoch": 0, "tokens": [1], "alternatives": "AQ=="}]},
            "responses[0]: has alternatives that do not fit: 1 bytes, but its counts need 6",
        ),
        ({**GOOD, "responses": [{"epoch": 0, "tokens": [-1]}]}, "responses[0].tokens[0]: -1 is below the limit 0"),
    ],
)
def test_a_file_with_something_wrong_changes_nothing(run: Run, tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(json.dumps(some) for some in (GOOD, line)))
    code, text = run("restore", file, "--to", "127.0.0.1:1")  # checked before the service is reached
    assert code == 2
    assert f"{file}: line 2: {complaint}" in text
    assert text.count("\n") == 1


def test_a_file_that_cannot_be_read_and_a_missing_service_are_said(run: Run, tmp_path: Path) -> None:
    code, text = run("restore", tmp_path / "nothing.jsonl", "--to", "127.0.0.1:1")
    assert (code, "no such file or directory; give a readable file" in text) == (2, True)
    code, text = run("restore", tmp_path / "nothing.jsonl")
    assert (code, "the following arguments are required: --to; see histospec restore --help" in text) == (2, True)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("how", ["restore -", "restore /dev/stdin", "restore <(cat)", "restore fifo"])
def test_a_restore_reads_a_pipe_once(
    run: Run, data: Path, tmp_path: Path, server: Server, zipped: bool, how: str
) -> None:
    file = tmp_path / ("all.jsonl.gz" if zipped else "all.jsonl")
    run("snapshot", file, "--data-dir", data)
    os.mkfifo(tmp_path / "fifo")
    line = f"{sys.executable} -m histospec.server {how} --to {server.endpoint}"
    line = f"cat {file} > fifo & {line}" if "fifo" in how else f"cat {file} | {line}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(": 4 problems, 7 responses, 314 tokens\n"), done.stderr
    server.stop()
    store, original = on_disk(tmp_path, server.data_dir.name), on_disk(tmp_path)
    assert restorable(store) == restorable(original)
    store.close()
    original.close()


def through_a_pipe(server: Server, text: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "histospec.server", "restore", "-", "--to", server.endpoint, *flags]
    return subprocess.run(command, cwd="/", input=text, capture_output=True, text=True, timeout=60)


def test_a_pipe_with_something_wrong_says_what_was_restored_before_it(server: Server, connect: Connector) -> None:
    other = json.dumps({**GOOD, "namespace": "other"})
    done = through_a_pipe(server, f"{json.dumps(GOOD)}\n{other[:-2]}\n")
    assert done.returncode == 2
    assert done.stderr.startswith("histospec restore: the standard input: line 2: not JSON")
    assert (
        "(restored before it: 1 problems, 1 responses, 2 tokens; run again with --merge to add the rest)\n"
        in done.stderr
    )
    done = through_a_pipe(server, f"{other}\n{json.dumps(GOOD)}\n")
    assert done.returncode == 2
    assert "already has namespace 'run'" in done.stderr
    assert through_a_pipe(server, f"{other}\n{json.dumps(GOOD)}\n", "--merge").returncode == 0
    there = problems(export(connect(server.endpoint).stub))
    assert sorted((problem.namespace, len(records)) for problem, records in there.items()) == [("other", 1), ("run", 1)]
