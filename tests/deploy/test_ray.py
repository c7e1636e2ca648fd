"""The job of docs/slurm-and-ray.md on a real cluster of Ray: a head, and a node that has none of the job's variables.

It needs an environment with Ray: `make test-ray`.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.children import Child
from tests.support.ports import free_port
from tests.support.programs import ROOT

pytest.importorskip("ray", reason="needs Ray: make test-ray")

PAGE = ROOT / "docs" / "slurm-and-ray.md"
TRAINER = """
import os, sys, time
import ray
from histospec.client import DraftClient, Response

@ray.remote(resources={"elsewhere": 1})
def roll_out():
    with DraftClient(deadline=30.0) as client:
        known = len(client.history([1, 2]))
        client.ingest([1, 2], [Response([3, 4, 5])], epoch=0)
    return known, os.environ["HISTOSPEC_NAMESPACE"], os.environ["HISTOSPEC_ENABLE"]

ray.init(address="auto")
print("the worker says", *ray.get(roll_out.remote()), flush=True)
while "wait" in sys.argv:
    time.sleep(0.1)
"""


@contextmanager
def ray(folder: Path, *words: object) -> Iterator[Child]:
    """Runs Ray's command with the folder's `histospec`, and without variables of HistoSpec."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HISTOSPEC_", "RAY_"))}
    bin = Path(sys.executable).parent
    clean |= {
        "PATH": f"{folder}:{bin}:{clean['PATH']}",
        "RAY_JOB_STOP_WAIT_TIME_S": "300",
        "RAY_AUTH_MODE": "disabled",
        "HISTOSPEC_MEMORY": "64MiB",
    }
    child = Child(bin / "ray", *words, cwd=folder, env=clean)
    with child:
        yield child
        child.send_signal(signal.SIGTERM)  # `ray start --block` then ends the processes that it started
        child.end()


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster's dashboard."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "histospec").write_text(f'#!/bin/sh\nexec {sys.executable} -m histospec.server "$@"\n')
    (folder / "histospec").chmod(0o755)
    gcs, http = (free_port() for _ in range(2))
    common = ("--block", "--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats")
    # Short, because paths of sockets are bounded.
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # Ray's own range of ports for workers might have the two above.
    head = ("--head", f"--port={gcs}", f"--dashboard-port={http}", "--min-worker-port=0", "--max-worker-port=0")
    with ray(folder, "start", *head, *common, "--temp-dir", temporary) as started:
        started.wait_for("Ray runtime started")
        other = ("--address", f"127.0.0.1:{gcs}", "--resources", '{"elsewhere": 1}')
        with ray(folder, "start", *other, *common) as joined:
            joined.wait_for("Ray runtime started")
            yield f"http://127.0.0.1:{http}"
    shutil.rmtree(temporary, ignore_errors=True)


def submitted(page_address: str, dashboard: str, folder: Path, *words: str) -> list[str]:
    """The words of the page's command, for this cluster, folder and trainer. `words`: the trainer's arguments."""
    (text,) = re.findall(r"^ray job submit .*\\\n.*$", PAGE.read_text(), re.M)
    (folder / "train.py").write_text(TRAINER)
    values = {page_address: dashboard, "/shared/histospec/grpo-1": str(folder / "data")}
    found = [values.get(word, word) for word in shlex.split(text.replace("\\\n", " "))]
    assert found[:3] == ["ray", "job", "submit"]
    assert found[-2:] == ["python", "train.py"]
    return [*found[1:-2], sys.executable, str(folder / "train.py"), *words]


def test_workers_on_other_nodes_find_the_server(dashboard: str, tmp_path: Path) -> None:
    for known in (0, 1):
        with ray(tmp_path, *submitted("http://head:8265", dashboard, tmp_path)) as job:
            job.wait_for(f"the worker says {known} grpo-1 1")
            job.wait_for('"event": "stopped"')
            job.wait_for("succeeded")


def test_a_stopped_job_drains_the_server(dashboard: str, tmp_path: Path) -> None:
    with ray(tmp_path, *submitted("http://head:8265", dashboard, tmp_path, "wait")) as job:
        job.wait_for("submitted successfully")
        job.wait_for("the worker says 0 grpo-1 1")
        (name,) = set(re.findall(r"raysubmit_\w+", job.so_far()))
        with ray(tmp_path, "job", "stop", "--address", dashboard, name) as stop:
            stop.wait_for("stopped")
        job.wait_for('"event": "stopped"')
        assert "stopping at once" not in job.so_far()
