"""A store as a file: the same content from every kind of store, and never an incomplete file."""

import base64
import gzip
import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.v1 import draft_pb2 as pb
from tests.server.commands.conftest import Run
from tests.support import children
from tests.support.batches import put
from tests.support.children import Child
from tests.support.contents import OTHERS, in_redis, large, logprobs, on_disk, restorable, tokens
from tests.support.redis_processes import RedisCluster, RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Stream, Wire


def test_a_store_goes_to_a_file_to_another_kind_of_store_and_back(
    run: Run,
    data: Path,
    tmp_path: Path,
    redis_server: RedisProcess,
    redis_cluster: RedisCluster,
    start_server: Starter,
) -> None:
    for target in (redis_server, redis_cluster):
        first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl.gz"
        whole = "4 problems, 7 responses, 314 tokens\n"
        assert run("snapshot", first, "--data-dir", data) == (0, f"{first}: {whole}")
        server = start_server("--store", target.url)
        assert run("restore", first, "--to", server.endpoint) == (0, f"{first}: {whole}")
        assert run("snapshot", second, "--store", target.url) == (0, f"{second}: {whole}")
        with gzip.open(second, "rb") as file:
            assert sorted(json.loads(line)["prompt"] for line in file) == [[1, 2], [1, 2], [1, 2], [3]]
        fresh = start_server()
        assert run("restore", second, "--to", fresh.endpoint) == (0, f"{second}: {whole}")
        fresh.stop()
        original, redis, copy = on_disk(tmp_path), in_redis(target), on_disk(tmp_path, fresh.data_dir.name)
        expected = restorable(original)
        assert sum(map(len, expected.values())) == 7
        assert restorable(redis) == restorable(copy) == expected
        assert original.newest_epochs() == {**copy.newest_epochs(), "empty": 0}
        for store in (original, redis, copy):
            store.close()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_all_responses_of_a_store_are_taken_unless_a_limit_is_given(
    run: Run, tmp_path: Path, redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The server may keep more than the default of the command."""
    store = on_disk(tmp_path, "many", 6000) if kind == "sqlite" else in_redis(redis_server, 6000)
    store.append(ResponseBatch(Problem("run", b"prompt.."), [Record(tokens(i), 1) for i in range(5000)])).result()
    put(store, tokens(7), prompt=b"another.")
    store.close()
    where = ("--data-dir", tmp_path / "many") if kind == "sqlite" else ("--store", redis_server.url)
    file = tmp_path / "all.jsonl"
    assert run("snapshot", file, *where) == (0, f"{file}: 2 problems, 5001 responses, 5001 tokens\n")
    left = "2 problems, 4 responses, 4 tokens, 4997 older responses left out (--history-responses)"
    assert run("snapshot", file, *where, "--history-responses", "3") == (0, f"{file}: {left}\n")
    lines = [json.loads(line)["responses"] for line in file.read_text().splitlines()]
    assert sorted([response["tokens"] for response in some] for some in lines) == [[[7]], [[4997], [4998], [4999]]]
    monkeypatch.setenv("HISTOSPEC_HISTORY_RESPONSES", "3")
    assert run("snapshot", file, *where) == (0, f"{file}: {left}\n")


def test_a_snapshot_may_go_to_the_standard_output(data: Path) -> None:
    command = [sys.executable, "-m", "histospec.server", "snapshot", "-", "--data-dir", str(data)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "-: 4 problems, 7 responses, 314 tokens\n")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]  # Infinity is no JSON
    assert [line["namespace"] for line in lines] == ["other ❤", "run", "run", "run"]
    assert [line.get("id") for line in lines[1:]] == [None, "a name ❤", "turns"]
    turns = lines[3]["responses"][0]
    with np.errstate(over="ignore"):
        assert np.array(turns.pop("logprobs"), "<f4").tobytes() == logprobs(4)
    assert base64.b64decode(turns.pop("alternatives")) == OTHERS
    assert turns == {
        "epoch": 1,
        "turns": [
            {"role": "assistant", "tokens": [1]},
            {"role": "environment", "tokens": [2, 3]},
            {"role": "assistant", "tokens": [2**31 - 1]},
        ],
        "reward": 2.0,
        "seed": 7,
    }
    assert lines[3]["responses"][1] == {"epoch": 1, "tokens": [8, 9], "seed": 0}


def test_a_store_of_another_version_is_not_read(run: Run, data: Path, tmp_path: Path) -> None:
    with sqlite3.connect(data / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 2")
    code, text = run("snapshot", tmp_path / "all.jsonl", "--data-dir", data)
    assert code == 2
    assert "was written by another version of HistoSpec (schema 2, this server needs 1); take a snapshot" in text


def test_namespaces_are_chosen_by_a_pattern(run: Run, data: Path, tmp_path: Path, server: Server) -> None:
    file = tmp_path / "some.jsonl"
    assert "1 problems, 1 responses, 1 tokens" in run("snapshot", file, "--data-dir", data, "--namespace", "oth*")[1]
    run("snapshot", file, "--data-dir", data)
    assert "1 problems" in run("restore", file, "--to", server.endpoint, "--namespace", "oth*")[1]
    server.stop()
    store = on_disk(tmp_path, server.data_dir.name)
    assert store.newest_epochs() == {"other ❤": 1}
    store.close()


def test_the_environment_and_a_servers_file_say_which_store(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serve.toml").write_text(f'data-dir = "{data}"\nmemory = "1GiB"\n')
    file = tmp_path / "all.jsonl"
    assert run("snapshot", file, "--config", tmp_path / "serve.toml")[0] == 0
    monkeypatch.setenv("HISTOSPEC_DATA_DIR", str(tmp_path / "nowhere"))
    code, text = run("snapshot", file)
    assert code == 2
    assert "there is no store at" in text


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk; SQLite's own files are smaller."""
    store = on_disk(tmp_path)
    for number in range(10):
        put(store, bytes(100_000), number)
    store.close()
    file = tmp_path / "all.jsonl"
    file.write_text("old")
    command = ["prlimit", "--fsize=100000", sys.executable, "-m", "histospec.server", "snapshot", str(file)]
    command += ["--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stderr == f"histospec snapshot: {file}: file too large; the file is unchanged\n"
    assert done.returncode == 1
    assert [path.name for path in tmp_path.glob("all*")] == ["all.jsonl"]
    assert file.read_text() == "old"


def long_snapshot(tmp_path: Path) -> Child:
    """Returns a process in the middle of writing all.jsonl.gz."""
    large(tmp_path)
    file = tmp_path / "all.jsonl.gz"
    child = children.histospec("snapshot", file, "--data-dir", tmp_path / "data")
    eventually(lambda: any(path.stat().st_size > 10_000 for path in partial(tmp_path)), "nothing is written")
    return child


def partial(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("all.jsonl.gz.*.partial"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_snapshot_that_is_interrupted_leaves_nothing(tmp_path: Path, number: int) -> None:
    with long_snapshot(tmp_path) as child:
        child.send_signal(number)
        assert child.end() == (128 + number, "")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_snapshot_of_a_running_server_drafts_where_it_is_restored(
    run: Run,
    server: Server,
    wire: Wire,
    start_server: Starter,
    connect: Connector,
    redis_server: RedisProcess,
    tmp_path: Path,
) -> None:
    """What is written to the first server afterwards is not in it; a second one on what was restored goes on."""
    response = list(range(100, 140))
    wire.ingest([1, 2, 3], [response], epoch=7)
    other = pb.Response(tokens=wire.i32([1]))
    wire.stub.Ingest(pb.IngestRequest(namespace="run", problem="p", prompt=wire.i32([4]), responses=[other]))
    file = tmp_path / "all.jsonl"
    assert run("snapshot", file, "--data-dir", server.data_dir)[1] == f"{file}: 2 problems, 2 responses, 41 tokens\n"
    wire.ingest([1, 2, 3], [[1]], epoch=8)
    for second in (start_server("--store", redis_server.url), start_server(name="copy")):
        assert run("restore", file, "--to", second.endpoint)[0] == 0
        there = connect(second.endpoint)
        assert there.history([1, 2, 3]) == [response]
        stream = there.stream()
        stream.ask(opens=[there.open(1)], step=there.step([1], [[]]))

        def drafts(there: Wire = there, stream: Stream = stream) -> list[int]:
            return there.drafts(stream.ask(step=there.step([1], [[]])))[0]

        eventually(drafts, "it does not draft")
        answer = stream.ask(step=there.step([1], [response[:3]]))
        assert there.drafts(answer)[0][:2] == response[3:5]
