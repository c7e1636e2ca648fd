"""Restores a file of responses to a store: merged or not, whole or not at all, through pipes."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from histospec.server.commands import into_store
from histospec.server.errors import StoreFull
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.writes import Appender
from tests.support.batches import batch, put
from tests.support.contents import BATCHES, content, on_disk, tokens
from tests.support.servers import Server


def test_what_is_there_is_left_alone_unless_it_is_merged(
    run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", data)
    store = on_disk(tmp_path, "new")
    put(store, tokens(1), namespace="run", prompt=tokens(7))
    store.append(BATCHES[0]._replace(records=BATCHES[0].records[:1])).result()
    store.save_estimator("run", b"its own").result()
    before = content(store)
    store.close()
    code, text = run("restore", file, "--data-dir", tmp_path / "new")
    assert code == 2
    assert "already has namespace 'run'" in text
    store = on_disk(tmp_path, "new")
    assert content(store) == before
    store.close()
    assert "6 responses" in run("restore", file, "--data-dir", tmp_path / "new", "--merge")[1]
    assert "4 problems, 0 responses" in run("restore", file, "--data-dir", tmp_path / "new", "--merge")[1]
    store, original = on_disk(tmp_path, "new"), on_disk(tmp_path)
    expected = content(original)[0] | {Problem("run", tokens(7)): [Record(tokens(1), 0)]}
    assert content(store) == (expected, {"run": b"its own"})
    store.close()
    original.close()


def test_restored_responses_obey_the_window(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    for epoch in range(8):
        put(store, tokens(epoch), epoch)
    store.close()
    run("snapshot", tmp_path / "all.jsonl", "--data-dir", tmp_path / "data")
    run("restore", tmp_path / "all.jsonl", "--data-dir", tmp_path / "new", "--history-epochs", "2")
    store = on_disk(tmp_path, "new")
    assert [record.epoch for record in store.history(Problem("run", b"prompt.."))] == [6, 7]
    store.close()


def test_a_restore_of_more_than_fits_at_once_arrives(
    run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(into_store, "BYTES", 1000)
    store = on_disk(tmp_path)
    for future in [store.append(batch(bytes(400), prompt=tokens(n))) for n in range(500)]:
        future.result()
    store.close()
    run("snapshot", tmp_path / "all.jsonl", "--data-dir", tmp_path / "data")
    assert (
        "500 problems, 500 responses, 50000 tokens"
        in run("restore", tmp_path / "all.jsonl", "--data-dir", tmp_path / "new")[1]
    )
    store = on_disk(tmp_path, "new")
    assert store.count() == 500
    store.close()


def test_a_restore_that_the_store_ends_can_be_gone_on_with(
    run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", data)
    append, seen = Appender.append, []

    def failing(self: Any, connection: sqlite3.Connection, batch: ResponseBatch) -> None:
        seen.append(batch)
        if len(seen) > 2:
            raise StoreFull("store: full; nothing of this request was kept")
        append(self, connection, batch)

    monkeypatch.setattr(Appender, "append", failing)
    code, text = run("restore", file, "--data-dir", tmp_path / "new")
    assert code == 1
    assert "run again with --merge" in text
    monkeypatch.setattr(Appender, "append", append)
    assert run("restore", file, "--data-dir", tmp_path / "new", "--merge")[0] == 0
    store, original = on_disk(tmp_path, "new"), on_disk(tmp_path)
    assert content(store)[0] == content(original)[0]
    store.close()
    original.close()


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
def test_a_file_with_something_wrong_changes_nothing(
    run: Callable[..., tuple[int, str]], tmp_path: Path, line: str, complaint: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(json.dumps(some) for some in (GOOD, line)))
    code, text = run("restore", file, "--data-dir", tmp_path / "new")
    assert code == 2
    assert f"{file}: line 2: {complaint}" in text
    assert text.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_file_that_cannot_be_read_and_a_store_in_use_are_said(
    run: Callable[..., tuple[int, str]], server: Server, tmp_path: Path
) -> None:
    code, text = run("restore", tmp_path / "nothing.jsonl", "--data-dir", tmp_path / "new")
    assert (code, "no such file or directory; give a readable file" in text) == (2, True)
    (tmp_path / "good.jsonl").write_text(json.dumps(GOOD))
    code, text = run("restore", tmp_path / "good.jsonl", "--data-dir", server.data_dir)
    assert (code, "another server uses it" in text) == (2, True)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("how", ["restore -", "restore /dev/stdin", "restore <(cat)", "restore fifo"])
def test_a_restore_reads_a_pipe_once(
    run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path, zipped: bool, how: str
) -> None:
    file = tmp_path / ("all.jsonl.gz" if zipped else "all.jsonl")
    run("snapshot", file, "--data-dir", data)
    os.mkfifo(tmp_path / "fifo")
    line = f"{sys.executable} -m histospec.server {how} --data-dir {tmp_path / 'new'}"
    line = f"cat {file} > fifo & {line}" if "fifo" in how else f"cat {file} | {line}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(": 4 problems, 7 responses, 314 tokens\n"), done.stderr
    store, original = on_disk(tmp_path, "new"), on_disk(tmp_path)
    assert content(store) == content(original)
    store.close()
    original.close()


def through_a_pipe(tmp_path: Path, text: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "histospec.server", "restore", "-", "--data-dir", str(tmp_path / "new"), *flags]
    return subprocess.run(command, cwd="/", input=text, capture_output=True, text=True, timeout=60)


def test_a_pipe_with_something_wrong_says_what_was_restored_before_it(tmp_path: Path) -> None:
    other = json.dumps({**GOOD, "namespace": "other"})
    done = through_a_pipe(tmp_path, f"{json.dumps(GOOD)}\n{other[:-2]}\n")
    assert done.returncode == 2
    assert done.stderr.startswith("histospec restore: the standard input: line 2: not JSON")
    assert (
        "(restored before it: 1 problems, 1 responses, 2 tokens; run again with --merge to add the rest)\n"
        in done.stderr
    )
    done = through_a_pipe(tmp_path, f"{other}\n{json.dumps(GOOD)}\n")
    assert done.returncode == 2
    assert "already has namespace 'run'" in done.stderr
    assert through_a_pipe(tmp_path, f"{other}\n{json.dumps(GOOD)}\n", "--merge").returncode == 0
    store = on_disk(tmp_path, "new")
    assert sorted(store.newest_epochs()) == ["other", "run"]
    assert store.count() == 2
    store.close()
