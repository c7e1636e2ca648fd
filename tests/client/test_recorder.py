"""HISTOSPEC_RECORD: commits and ingests of a process, as a file for `histospec replay`."""

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from histospec.client import AsyncDraftClient, ConfigurationError, DraftClient, Response
from histospec.client import recorder as recorder_module
from histospec.client.config import Timeouts
from histospec.client.recorder import Recorder
from histospec.replay import command as replay
from tests.support.servers import Server
from tests.support.waiting import eventually

ABSENT = "127.0.0.1:9"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server")).start()
    yield server
    server.stop()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rollouts.jsonl"
    monkeypatch.setenv("HISTOSPEC_RECORD", str(path))
    return path


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without(record: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in fields}


def test_what_sessions_commit_and_what_is_ingested_is_recorded(server: Server, file: Path) -> None:
    with DraftClient(server.endpoint, "recorded", deadline=5) as client:
        first, second, third = client.open([[1, 2]] * 3, ["p", None, None], seeds=[7, None, None])
        client.step([first, second, third], [[5, 6], [8], [9]])
        client.step([first], [[7]])
        client.close([first], epochs=3, rewards=0.5)
        client.close([second], changes=2)
        client.close([third], commit=False)
        client.ingest([1], [Response([4, 4, 5], generated=[True, False, True], seed=3, reward=1.0)], epoch=4)
        assert client.ingest_many([[2], [3]], [[Response([6])], [Response([7]), Response([8])]], epoch=5) == [True] * 2
    found = recorded(file)
    assert found[0] == {"namespace": "recorded", "id": "p", "epoch": 3, "seed": 7, "reward": 0.5, "prompt": [1, 2],
                        "tokens": [5, 6, 7]}  # fmt: skip
    assert without(found[1], "worker") == {"namespace": "recorded", "changes": 2, "prompt": [1, 2], "tokens": [8]}
    assert found[2]["turns"] == [
        {"role": "assistant", "tokens": [4]},
        {"role": "environment", "tokens": [4]},
        {"role": "assistant", "tokens": [5]},
    ]
    assert sorted(record["tokens"] for record in found[3:]) == [[6], [7], [8]]
    assert client.stats().recorded == 6
    assert client.stats().unrecorded == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_asyncio_client_records_too(server: Server, file: Path) -> None:
    async def run() -> None:
        async with AsyncDraftClient(server.endpoint, "recorded-async", deadline=5) as client:
            sessions = await client.open([[1, 2]])
            await client.step(sessions, [[5]])
            await client.close(sessions, epochs=1)
            await client.ingest([1], [Response([4])], epoch=2)

    asyncio.run(run())
    assert [(record["epoch"], record["tokens"]) for record in recorded(file)] == [(1, [5]), (2, [4])]


def test_an_ingest_that_the_server_did_not_take_is_not_recorded(file: Path) -> None:
    with DraftClient(ABSENT, "recorded") as client, pytest.raises(Exception, match="Ingest"):
        client.ingest([1], [Response([4])])
    assert recorded(file) == []


def test_a_recording_gives_the_table_of_its_rollouts(
    server: Server, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares a run through the client with the same responses written by hand."""
    rng = np.random.default_rng(0)
    problems = []
    with DraftClient(server.endpoint, "table", deadline=5) as client:
        for i in range(4):
            text, prompt, responses = rng.integers(10, 1000, 80), [1, 2, i], []
            for epoch in range(3):
                said = [np.where(rng.random(80) < 0.05, rng.integers(10, 1000, 80), text).tolist() for _ in range(2)]
                sessions = client.open([prompt] * 2)
                client.step(sessions, [tokens[:50] for tokens in said])
                client.step(sessions, [tokens[50:] for tokens in said])
                client.close(sessions, epochs=epoch)
                responses += [{"epoch": epoch, "tokens": tokens} for tokens in said]
            problems.append({"prompt": prompt, "responses": responses})
    same = tmp_path / "same.jsonl"
    same.write_text("\n".join(map(json.dumps, problems)) + "\n")
    figures = []
    for path in (file, same):
        assert replay.main([str(path), "--no-plot", "--json", "-"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0]["last_visit"] == figures[1]["last_visit"]
    assert figures[0]["epochs"] == figures[1]["epochs"]
    assert figures[0]["last_visit"]["costs"][0]["tokens_per_step"] > 1.5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "absent/rollouts.jsonl",
            "no such file or directory; give a file in an existing folder, or unset the variable",
        ),
        (".", "is a directory"),
        ("/dev/null", "is a device or a pipe; give a file, or unset the variable"),
        ("nul\0", "embedded null"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_at_the_start(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"HISTOSPEC_RECORD: .*{why}"):
        Recorder(str(tmp_path / name), "run")


def test_the_client_says_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HISTOSPEC_RECORD", str(tmp_path / "absent" / "file"))
    for make in (DraftClient, AsyncDraftClient):
        with pytest.raises(ConfigurationError, match="HISTOSPEC_RECORD: cannot write"):
            make(ABSENT, "run")


def test_a_disk_that_hangs_holds_nobody_up(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue is bounded; responses in it are written when the disk is back."""
    back = threading.Event()
    write = os.write

    def hang(number: int, line: bytes) -> int:
        assert back.wait(60)
        return write(number, line)

    monkeypatch.setattr(recorder_module, "MOST_WAITING", 100)
    monkeypatch.setattr(os, "write", hang)
    client = DraftClient(ABSENT, "run")
    for _ in range(50):
        sessions = client.open([[1, 2]], generated=[[3, 4, 5]])
        client.close(sessions)  # 20 bytes each
    assert client.stats().unrecorded == 45
    back.set()
    client.shutdown()
    assert client.stats().recorded == len(recorded(file)) == 5
    said = [record.message for record in caplog.records if "HISTOSPEC_RECORD" in record.message]
    assert len(said) == 1
    assert "MiB wait; recording stops, the run goes on" in said[0]


def test_the_end_waits_while_lines_are_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for the thread lets it write one line of ten."""
    allowed = threading.Semaphore(0)
    write, join = os.write, threading.Thread.join

    def slow(number: int, line: bytes) -> int:
        assert allowed.acquire(timeout=60)
        return write(number, line)

    def wait(thread: threading.Thread, timeout: float | None = None) -> None:
        before = client.stats().recorded
        if thread.name == "histospec-record":
            allowed.release()
            while thread.is_alive() and client.stats().recorded == before:
                join(thread, 0.01)
        else:
            join(thread, timeout)

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr(threading.Thread, "join", wait)
    client = DraftClient(ABSENT, "run", timeouts=Timeouts(shutdown=0.01))
    client.close(client.open([[1, 2]] * 10, generated=[[3, 4, 5]] * 10))
    client.shutdown()
    assert (client.stats().recorded, client.stats().unrecorded, len(recorded(file))) == (10, 0, 10)


def test_what_is_not_written_at_the_end_is_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, back = threading.Event(), threading.Event()
    write = os.write

    def hang(number: int, line: bytes) -> int:
        begun.set()
        assert back.wait(60)
        return write(number, line)

    monkeypatch.setattr(recorder_module, "PATIENCE", 0.05)
    monkeypatch.setattr(os, "write", hang)
    client = DraftClient(ABSENT, "run", timeouts=Timeouts(shutdown=0.01))
    client.close(client.open([[1, 2]] * 10, generated=[[3, 4, 5]] * 10))
    assert begun.wait(60)
    client.shutdown()
    assert (client.stats().recorded, client.stats().unrecorded) == (0, 9)
    said = [record.message for record in caplog.records if "HISTOSPEC_RECORD" in record.message]
    assert [line.partition("; ")[0] for line in said] == [
        f"HISTOSPEC_RECORD: {file}: the disk is too slow, 9 responses are not written"
    ]
    back.set()
    eventually(lambda: client.stats().recorded == 1, "the line in the thread's hands is written")
    assert client.stats().unrecorded == 9


RUN = """
import os, resource, sys
from histospec.client import DraftClient

def respond(client, count, length=100):
    for i in range(count):
        sessions = client.open([[1, os.getpid()]], generated=[list(range(length))])
        client.close(sessions, epochs=i)

client = DraftClient("127.0.0.1:9", "run")
"""


def run(program: str, file: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HISTOSPEC_RECORD": str(file)}
    return subprocess.run(
        [sys.executable, "-c", RUN + program], capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path) -> None:
    program = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "respond(client, 20)\nclient.shutdown()\n"
        "s = client.stats()\nprint(s.recorded, s.unrecorded)\n"
    )
    done = run(program, tmp_path / "rollouts.jsonl")
    assert done.returncode == 0, done.stderr
    written, lost = map(int, done.stdout.split())
    assert 0 < written < 20
    assert written + lost == 20
    assert done.stderr.count("HISTOSPEC_RECORD") == 1
    assert "recording stops, the run goes on" in done.stderr
    whole = (tmp_path / "rollouts.jsonl").read_text().splitlines()[:written]
    assert [json.loads(line)["epoch"] for line in whole] == list(range(written))


@pytest.mark.parametrize("end", ["client.shutdown()", "del client", "pass"])
def test_the_last_lines_are_written_however_the_process_ends(end: str, tmp_path: Path) -> None:
    done = run(f"respond(client, 200)\n{end}\n", tmp_path / "rollouts.jsonl")
    assert done.returncode == 0, done.stderr
    assert [record["epoch"] for record in recorded(tmp_path / "rollouts.jsonl")] == list(range(200))


def test_processes_share_a_file(tmp_path: Path) -> None:
    """Lines of 12 KB from four at once: each is whole, none is lost."""
    program = RUN + "respond(client, 150, 2000)\nclient.shutdown()\n"
    environment = {**os.environ, "HISTOSPEC_RECORD": str(tmp_path / "rollouts.jsonl")}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    found = recorded(tmp_path / "rollouts.jsonl")
    for process in processes:
        mine = [record for record in found if record["prompt"] == [1, process.pid]]
        assert [record["epoch"] for record in mine] == list(range(150))


def test_a_process_forked_before_the_first_connection_records_its_own(tmp_path: Path) -> None:
    program = (
        "respond(client, 5)\n"
        "child = os.fork()\n"
        "respond(client, 5)\nclient.shutdown()\n"
        "if child:\n    assert os.waitpid(child, 0)[1] == 0\nelse:\n    os._exit(0)\n"
        "print(child)\n"
    )
    done = run(program, tmp_path / "rollouts.jsonl")
    assert done.returncode == 0, done.stderr
    found = recorded(tmp_path / "rollouts.jsonl")
    child = int(done.stdout)
    assert sorted(record["epoch"] for record in found if record["prompt"][1] == child) == list(range(5))
    assert sorted(record["epoch"] for record in found if record["prompt"][1] != child) == sorted([*range(5)] * 2)


def test_a_process_forked_after_it_records_nothing(server: Server, file: Path) -> None:
    program = (
        "from histospec.client import Unavailable\n"
        f"client = DraftClient({server.endpoint!r}, 'forked', deadline=5)\n"
        "client.step(client.open([[1]]), [[2]])\n"
        "client.flush()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n        respond(client, 1)\n"
        "    except Unavailable:\n        os._exit(0)\n"
        "    os._exit(1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "respond(client, 1)\nclient.shutdown()\n"
    )
    done = run(program, file)
    assert done.returncode == 0, done.stderr
    assert len(recorded(file)) == 1
