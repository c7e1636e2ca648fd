"""`histospec run`: a command with a draft server beside it, which starts, restarts and drains with the command."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.children import Child

STORES = """
from histospec.client import DraftClient, Response
with DraftClient(namespace="run", deadline=30.0) as client:
    print("known before:", len(client.history([1, 2])))
    client.ingest([1, 2], [Response([3, 4, 5])], epoch=0)
    print("endpoint:", client.endpoint if hasattr(client, "endpoint") else "")
"""
WAITS = """
import os, signal, sys, time
def say(*words):                   # not by print, which raises if a signal handler prints while it writes
    os.write(1, (" ".join(words) + "\\n").encode())
def end(number, frame):
    say("the command got", signal.Signals(number).name)
    sys.exit(9)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
say("the command runs", os.environ["HISTOSPEC_ENDPOINT"], os.environ["HISTOSPEC_TOKEN"])
while True:
    time.sleep(0.1)
"""


@contextmanager
def run(folder: Path, code: str, *flags: str, **variables: str) -> Iterator[Child]:
    """Runs Python code as the command; its folder is `folder`, and so is the store's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HISTOSPEC_")}
    words = [sys.executable, "-m", "histospec.server", "run", "--data-dir", folder / "data", "--memory", "64MiB"]
    child = Child(*words, *flags, "--", sys.executable, "-c", code, cwd=folder, env=clean | variables)
    with child:
        yield child
        if child.process.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def said(output: str, event: str) -> list[dict[str, object]]:
    """The server's log lines of this event."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == event]


def test_the_history_of_a_job_is_there_for_the_next_one(tmp_path: Path) -> None:
    for known in (0, 1):
        with run(tmp_path, STORES) as child:
            code, output = child.end()
        assert code == 0, output
        assert f"known before: {known}\n" in output
        assert said(output, "stopped"), "the server did not drain"
        (listening,) = said(output, "listening")
        assert str(listening["grpc"]).startswith("0.0.0.0:")
        assert str(listening["http"]).startswith("127.0.0.1:"), "the HTTP port needs no token"


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    with run(tmp_path, "raise SystemExit(7)") as child:
        assert child.end()[0] == 7
    with run(tmp_path, "import os; os.kill(os.getpid(), 9)") as child:
        assert child.end()[0] == 137


def test_a_signal_ends_the_command_and_then_drains_the_server(tmp_path: Path) -> None:
    """SIGINT is not passed on: a terminal sends it to the command itself."""
    with run(tmp_path, WAITS) as child:
        child.wait_for("the command runs")
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        code, output = child.end()
    assert code == 9, output
    assert "the command got SIGTERM" in output
    assert "the command got SIGINT" not in output
    assert output.index("the command got") < output.index('"event": "draining"') < output.index('"event": "stopped"')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_does_not_cut_the_drain_short(tmp_path: Path, number: signal.Signals) -> None:
    """Terminals, Slurm and Ray send such signals. A second SIGTERM would end the server at once."""
    sleeps = "import os; print('the command runs', flush=True); os.execvp('sleep', ['sleep', '1000'])"
    with run(tmp_path, sleeps) as child:
        child.wait_for("the command runs")
        os.killpg(child.pid, number)
        code, output = child.end()
    assert code == 128 + number
    assert len(said(output, "draining")) == len(said(output, "stopped")) == 1
    assert not said(output, "stopping at once")


def server_of(launcher: int) -> int | None:
    """The process of the server."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    for task in children.parent.parent.glob("*/children"):
        for pid in map(int, task.read_text().split()):
            if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    return None


def test_a_server_that_crashes_comes_back_at_the_same_address(tmp_path: Path) -> None:
    with run(tmp_path, WAITS) as child:
        child.wait_for("the command runs")
        crashed = server_of(child.pid)
        assert crashed is not None
        os.kill(crashed, signal.SIGKILL)
        child.wait_for("it starts again at")
        child.wait_for('"event": "listening"')
        assert server_of(child.pid) not in (None, crashed)
        child.send_signal(signal.SIGTERM)
        code, output = child.end()
    assert code == 9
    before, after = said(output, "listening")
    assert before["grpc"] == after["grpc"]
    assert said(output, "stopped")


def test_the_command_does_not_run_if_the_server_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file, where the server needs a directory")
    with run(tmp_path, "print('the command runs')") as child:
        code, output = child.end()
    assert code == 2
    assert "the command runs" not in output
    assert "histospec serve: " in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--memory", "64MiB"], "histospec run: no command was given; put it behind --"),
        (["--"], "histospec run: no command was given; put it behind --"),
        (["--memroy", "1GiB", "--", "true"], "histospec run: unrecognized arguments: --memroy"),
        (["--memory", "much", "--", "true"], "histospec run: --memory: "),
    ],
)
def test_wrong_arguments(tmp_path: Path, words: list[str], sentence: str) -> None:
    with Child(sys.executable, "-m", "histospec.server", "run", *words, cwd=tmp_path) as child:
        code, output = child.end()
    assert code == 2
    assert output.startswith(sentence)


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with Child(sys.executable, "-m", "histospec.server", "run", "--", "./absent", cwd=tmp_path) as child:
        code, output = child.end()
    assert code == 2
    assert "histospec run: ./absent: cannot be started (no such file or directory)" in output
    assert said(output, "stopped")


VARIABLES = "import json, os; print('VARIABLES', json.dumps(dict(os.environ)))"


def variables(folder: Path, *flags: str, **given: str) -> dict[str, str]:
    """The environment of the command."""
    with run(folder, VARIABLES, *flags, **given) as child:
        code, output = child.end()
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("VARIABLES")]
    return dict(json.loads(line.partition(" ")[2]))


def test_the_workers_get_an_address_and_a_token(tmp_path: Path) -> None:
    """With --ray, Ray gets them, too, beside what it has."""
    job = {"runtime_env": {"working_dir": "gcs://a.zip", "env_vars": {"A": "1"}}, "metadata": {"job": "j"}}
    given = {"HISTOSPEC_ENABLE": "1", "HISTOSPEC_TOKEN_FILE": "/a", "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    found = variables(tmp_path, "--ray", "--host", "node-7", **given)
    assert found["HISTOSPEC_ENDPOINT"].startswith("node-7:")
    assert len(found["HISTOSPEC_TOKEN"]) > 32
    assert "HISTOSPEC_TOKEN_FILE" not in found, "the client refuses two tokens"
    passed = json.loads(found["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    ours = {name: value for name, value in found.items() if name.startswith("HISTOSPEC_")}
    assert ours.keys() == {"HISTOSPEC_ENDPOINT", "HISTOSPEC_TOKEN", "HISTOSPEC_ENABLE"}
    assert passed["runtime_env"] == {"working_dir": "gcs://a.zip", "env_vars": ours | {"A": "1"}}
    assert passed["metadata"] == job["metadata"]


def test_tokens_and_addresses_of_the_user_are_used(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "a"\nsecret = "a-secret-0123456789"\n')
    own = {"HISTOSPEC_TOKENS": str(tmp_path / "tokens.toml"), "HISTOSPEC_TOKEN_FILE": "/a"}
    found = variables(tmp_path, "--listen", "127.0.0.1:0", **own)
    assert found["HISTOSPEC_ENDPOINT"].startswith("127.0.0.1:")
    assert found["HISTOSPEC_TOKEN_FILE"] == "/a"
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in found
    without = variables(tmp_path, "--insecure", HISTOSPEC_LISTEN="[::1]:0")
    assert without["HISTOSPEC_ENDPOINT"].startswith("[::1]:")
    assert "HISTOSPEC_TOKEN" not in found.keys() | without.keys()
