"""The sbatch script of deploy/slurm, as Slurm runs it. Slurm's own commands are stubs that do what Slurm documents."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.children import Child
from tests.support.programs import ROOT, program

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
SRUN = """#!/usr/bin/env bash
# One task per node, all here. Like srun, it passes SIGTERM on to the tasks and ends with the highest exit code.
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NNODES; task++)); do SLURM_PROCID=$task "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
highest=0
for task in "${tasks[@]}"; do
  while kill -0 "$task" 2>/dev/null; do wait "$task" || true; done
  wait "$task"; code=$?
  ((code > highest)) && highest=$code
done
exit "$highest"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"$SLURM_STUBS/requests"
"""
TRAINER = """
import os, signal, sys, time
from histospec.client import DraftClient, Response
task = int(os.environ["SLURM_PROCID"])
def say(*words):
    "In one write, as other tasks write into the same pipe; not by print, which is not reentrant for `checkpoint`."
    os.write(1, (" ".join(map(str, ("task", task, *words))) + "\\n").encode())
with DraftClient(deadline=30.0) as client:
    say("knows", len(client.history([task])), os.environ["HISTOSPEC_ENABLE"])
    client.ingest([task], [Response([3, 4, 5])], epoch=0)
def checkpoint(number, frame):
    say("writes a checkpoint")
    sys.exit(3)
signal.signal(signal.SIGTERM, checkpoint)
say("trains")
while "wait" in sys.argv:
    time.sleep(0.1)
"""


def options() -> dict[str, str]:
    """The options of sbatch in the script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.M)
    assert len(found) == SCRIPT.read_text().count("#SBATCH")
    return dict(found)


@contextmanager
def job(folder: Path, *words: str, restarts: int = 0) -> Iterator[Child]:
    """Runs the script as Slurm does on the first of two nodes. `words`: the arguments of the command."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    launcher = f'#!/bin/sh\nexec {sys.executable} -m histospec.server "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("histospec", launcher)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (folder / "train.py").write_text(TRAINER)
    slurm = {
        "SLURM_JOB_ID": "42", "SLURM_JOB_NAME": options()["job-name"], "SLURM_NNODES": options()["nodes"],
        "SLURM_CPUS_PER_TASK": options()["cpus-per-task"], "SLURMD_NODENAME": "localhost", "SLURM_STUBS": str(stubs),
        "SLURM_RESTART_COUNT": str(restarts), "HISTOSPEC_MEMORY": "64MiB",
    }  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HISTOSPEC_")}
    clean |= {"HOME": str(folder), "PATH": f"{stubs}:{os.environ['PATH']}"}
    with Child("bash", SCRIPT, *words, cwd=folder, env=clean | slurm) as child:
        yield child
        if child.process.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def asked(folder: Path) -> list[str]:
    """What the script asked of scontrol."""
    path = folder / "stubs" / "requests"
    text = path.read_text() if path.exists() else ""
    return text.splitlines()


def test_bash_and_shellcheck_take_the_script() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    done = subprocess.run([program("shellcheck"), "--shell=bash", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_slurm_tells_the_script_before_it_ends_the_job() -> None:
    """And leaves the server time to drain."""
    _, at, seconds = options()["signal"].partition("@")
    assert options()["signal"].startswith("B:USR1")
    assert at
    assert int(seconds) >= 60
    assert {"requeue", "open-mode"} <= options().keys()


@pytest.mark.parametrize("restarts", [0, 1])
def test_every_node_reaches_the_server_and_a_requeued_job_its_history(tmp_path: Path, restarts: int) -> None:
    for known in range(restarts + 1):
        with job(tmp_path, sys.executable, "train.py", restarts=known) as child:
            code, output = child.end()
        assert code == 0, output
        for task in range(int(options()["nodes"])):
            assert f"task {task} knows {known} 1\n" in output
        assert '"event": "stopped"' in output, "the server did not drain"
    assert (tmp_path / "histospec" / "grpo").is_dir(), "the history is not in the folder that all nodes see"
    assert asked(tmp_path) == []


def test_before_the_time_limit_the_trainer_ends_then_the_server_and_the_job_queues_again(tmp_path: Path) -> None:
    with job(tmp_path, sys.executable, "train.py", "wait") as child:
        child.wait_for("trains", times=2)
        child.send_signal(signal.SIGUSR1)
        code, output = child.end()
    assert code == 3
    assert output.count("writes a checkpoint") == 2
    assert output.rindex("writes a checkpoint") < output.index('"event": "draining"') < output.index('"stopped"')
    assert asked(tmp_path) == ["requeue 42"]


def test_scancel_ends_all_without_another_turn(tmp_path: Path) -> None:
    """Slurm signals every process of the job."""
    with job(tmp_path, sys.executable, "train.py", "wait") as child:
        child.wait_for("trains", times=2)
        os.killpg(child.pid, signal.SIGTERM)
        code, output = child.end()
    assert code != 0
    assert '"event": "stopped"' in output
    assert "stopping at once" not in output
    assert asked(tmp_path) == []


def test_the_job_fails_if_the_trainer_does(tmp_path: Path) -> None:
    with job(tmp_path, "false") as child:
        code, output = child.end()
    assert code == 1
    assert '"event": "stopped"' in output


def test_no_command(tmp_path: Path) -> None:
    with job(tmp_path) as child:
        assert child.end() == (2, "usage: sbatch train.sbatch COMMAND [ARGUMENTS]\n")
