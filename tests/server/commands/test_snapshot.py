"""What a store holds as a file, and back: the same content, whichever the stores, and never half of it."""

import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.server import cli
from histospec.server.commands import snapshot
from histospec.server.errors import StoreFull
from histospec.server.stores.interface import Problem, Record, ResponseBatch, Store
from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.store import RedisStore
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.server.stores.sqlite.writes import Appender
from histospec.v1 import draft_pb2 as pb
from tests.support import children
from tests.support.batches import batch, put
from tests.support.children import Child
from tests.support.redis_processes import RedisCluster, RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector, Stream, Wire


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE", "DATA_DIR", "HISTORY_EPOCHS", "CONFIG"):
        monkeypatch.delenv(f"HISTOSPEC_{name}", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """run(word, ...) -> the exit status, and what was printed."""

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def tokens(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def logprobs(count: int) -> bytes:
    """Every kind of float32 that there is."""
    some = np.random.default_rng(count).integers(0, 2**32, count, np.uint64).astype("<u4").view("<f4")
    special = np.array([-0.0, 1e-45, -np.inf, np.finfo("f4").max, -0.1], "<f4")
    return np.resize(np.concatenate([special, some[~np.isnan(some)]]), count).tobytes()


BATCHES = [
    ResponseBatch(Problem("run", tokens(1, 2)), [Record(tokens(5, 6, 7), 0, 0.1), Record(tokens(5, 6, 7), 0, 0.1)]),
    ResponseBatch(
        Problem("run", tokens(1, 2)), [Record(tokens(*range(300)), 2**52, -1e-300, logprobs(300), seed=-(2**63))]
    ),
    ResponseBatch(Problem("run", tokens(1, 2), "a name ❤"), [Record(tokens(9), 3, None, b"", b"\0")]),
    ResponseBatch(
        Problem("run", tokens(3), "turns"),
        [
            Record(tokens(1, 2, 3, 2**31 - 1), 1, 2.0, logprobs(4), bytes([1, 0, 0, 1]), 7),
            Record(tokens(8, 9), 1, seed=0),
        ],
    ),
    ResponseBatch(Problem("other ❤", tokens(1, 2), "turns"), [Record(tokens(4), 1)]),
    ResponseBatch(Problem("empty", tokens(1)), [Record(tokens(4), 1)]),
]
STATE = os.urandom(1000)


def fill(store: Store) -> None:
    for some in BATCHES:
        store.append(some).result()
    store.rewind("empty", 0).result()
    store.save_estimator("run", STATE).result()


def content(store: Store) -> tuple[dict[Problem, list[Record]], dict[str, bytes]]:
    problems = {p: records for namespace in store.newest_epochs() for p, records in store.problems(namespace)}
    return problems, store.estimators()


def on_disk(tmp_path: Path, name: str = "data") -> SQLiteStore:
    return SQLiteStore(tmp_path / name, 8)


def in_redis(server: RedisProcess | RedisCluster) -> RedisStore:
    return RedisStore(Location.parse(server.url), 8, "shard-0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a store with a bit of everything."""
    store = on_disk(tmp_path)
    fill(store)
    store.close()
    return tmp_path / "data"


def test_a_store_goes_to_a_file_to_another_kind_of_store_and_back(
    run: Callable[..., tuple[int, str]],
    data: Path,
    tmp_path: Path,
    redis_server: RedisProcess,
    redis_cluster: RedisCluster,
) -> None:
    for target in (redis_server, redis_cluster):
        first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl.gz"
        whole = "4 problems, 7 responses, 314 tokens\n"
        assert run("snapshot", first, "--data-dir", data) == (0, f"{first}: {whole}")
        assert run("restore", first, "--store", target.url) == (0, f"{first}: {whole}")
        assert run("snapshot", second, "--store", target.url) == (0, f"{second}: {whole}")
        with gzip.open(second, "rb") as file:
            assert sorted(json.loads(line)["prompt"] for line in file) == [[1, 2], [1, 2], [1, 2], [3]]
        assert run("restore", second, "--data-dir", tmp_path / target.url[-4:]) == (0, f"{second}: {whole}")
        original, redis, copy = on_disk(tmp_path), in_redis(target), on_disk(tmp_path, target.url[-4:])
        expected = content(original)
        assert sum(map(len, expected[0].values())) == 7
        assert expected[1] == {"run": STATE}
        assert content(redis) == content(copy) == expected
        assert original.newest_epochs() == {**copy.newest_epochs(), "empty": 0}
        for store in (original, redis, copy):
            store.close()


def test_a_snapshot_can_be_replayed(run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", data)  # "turns" is in two namespaces
    code, text = run("replay", file, "--no-plot", "--json", "-")
    assert code == 0
    assert '"problems": 4' in text


def test_a_snapshot_may_go_to_the_standard_output(data: Path) -> None:
    command = [sys.executable, "-m", "histospec.server", "snapshot", "-", "--data-dir", str(data)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "-: 4 problems, 7 responses, 314 tokens\n")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["namespace"] for line in lines] == ["other ❤", "run", "run", "run"]
    assert [line.get("id") for line in lines[1:]] == [None, "a name ❤", "turns"]
    turns = lines[3]["responses"][0]
    assert np.array(turns.pop("logprobs"), "<f4").tobytes() == logprobs(4)
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


def test_a_store_of_an_older_version_is_not_read(
    run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path
) -> None:
    with sqlite3.connect(data / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 2")
    code, text = run("snapshot", tmp_path / "all.jsonl", "--data-dir", data)
    assert code == 2
    assert "was written by an older HistoSpec (schema 2, this one needs 5); start" in text


def test_namespaces_are_chosen_by_a_pattern(run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    assert "1 problems, 1 responses, 1 tokens" in run("snapshot", file, "--data-dir", data, "--namespace", "oth*")[1]
    run("snapshot", file, "--data-dir", data)
    assert "1 problems" in run("restore", file, "--data-dir", tmp_path / "new", "--namespace", "oth*")[1]
    store = on_disk(tmp_path, "new")
    assert store.newest_epochs() == {"other ❤": 1}
    store.close()


def test_the_environment_and_a_servers_file_say_which_store(
    run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serve.toml").write_text(f'data-dir = "{data}"\nmemory = "1GiB"\n')
    file = tmp_path / "all.jsonl"
    assert run("snapshot", file, "--config", tmp_path / "serve.toml")[0] == 0
    monkeypatch.setenv("HISTOSPEC_DATA_DIR", str(tmp_path / "nowhere"))
    code, text = run("snapshot", file)
    assert code == 2
    assert "there is no store at" in text


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
    assert "already holds the namespace 'run'" in text
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
    monkeypatch.setattr(snapshot, "BYTES", 1000)
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
    assert "restore again with --merge" in text
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


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the end of the disk; SQLite's own are smaller."""
    store = on_disk(tmp_path)
    for number in range(10):
        put(store, bytes(100_000), number)
    store.close()
    file = tmp_path / "all.jsonl"
    file.write_text("old")
    command = ["prlimit", "--fsize=100000", sys.executable, "-m", "histospec.server", "snapshot", str(file)]
    command += ["--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stderr == f"histospec snapshot: {file}: file too large; it is as it was\n"
    assert done.returncode == 1
    assert [path.name for path in tmp_path.glob("all*")] == ["all.jsonl"]
    assert file.read_text() == "old"


def long_snapshot(tmp_path: Path) -> Child:
    """A process that is in the middle of writing all.jsonl.gz."""
    store = on_disk(tmp_path)
    for future in [store.append(batch(bytes(40_000), prompt=tokens(n))) for n in range(3000)]:
        future.result()
    store.close()
    file = tmp_path / "all.jsonl.gz"
    child = children.histospec("snapshot", file, "--data-dir", tmp_path / "data")
    eventually(lambda: any(path.stat().st_size > 10_000 for path in partial(tmp_path)), "nothing is written")
    return child


def partial(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("all.jsonl.gz.*.partial"))


def test_a_snapshot_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    with long_snapshot(tmp_path) as child:
        child.process.kill()
        assert child.end()[0] == -signal.SIGKILL
    assert len(partial(tmp_path)) == 1
    assert not (tmp_path / "all.jsonl.gz").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_snapshot_that_is_interrupted_leaves_nothing(tmp_path: Path, number: int) -> None:
    with long_snapshot(tmp_path) as child:
        child.send_signal(number)
        assert child.end() == (128 + number, "")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_snapshot_is_for_its_owner_alone(run: Callable[..., tuple[int, str]], data: Path, tmp_path: Path) -> None:
    run("snapshot", tmp_path / "all.jsonl", "--data-dir", data)
    assert (tmp_path / "all.jsonl").stat().st_mode & 0o777 == 0o600


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
    assert "(restored before it: 1 problems, 1 responses, 2 tokens; go on with --merge)\n" in done.stderr
    done = through_a_pipe(tmp_path, f"{other}\n{json.dumps(GOOD)}\n")
    assert done.returncode == 2
    assert "already holds the namespace 'run'" in done.stderr
    assert through_a_pipe(tmp_path, f"{other}\n{json.dumps(GOOD)}\n", "--merge").returncode == 0
    store = on_disk(tmp_path, "new")
    assert sorted(store.newest_epochs()) == ["other", "run"]
    assert store.count() == 2
    store.close()


def test_a_snapshot_of_a_running_server_drafts_where_it_is_restored(
    run: Callable[..., tuple[int, str]],
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
    assert run("restore", file, "--store", redis_server.url)[0] == 0
    assert run("restore", file, "--data-dir", tmp_path / "copy")[0] == 0
    for second in (start_server("--store", redis_server.url), start_server(name="copy")):
        there = connect(second.endpoint)
        assert there.history([1, 2, 3]) == [response]
        stream = there.stream()
        stream.ask(opens=[there.open(1)], step=there.step([1], [[]]))

        def drafts(there: Wire = there, stream: Stream = stream) -> list[int]:
            return there.drafts(stream.ask(step=there.step([1], [[]])))[0]

        eventually(drafts, "it does not draft")
        answer = stream.ask(step=there.step([1], [response[:3]]))
        assert there.drafts(answer)[0][:2] == response[3:5]
