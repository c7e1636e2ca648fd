"""The images: hadolint has no findings. With HISTOSPEC_TEST_IMAGE=1 (make test-image), the real Dockerfiles are built
and run: buildah on a base from debootstrap, podman without a network; takes some minutes, and needs root. The base of
the workers' image stands for vLLM's: it has Python, pip and numpy, but no vLLM.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from scripts import lock
from scripts.release import package_version
from tests.support.pins import pins, version
from tests.support.programs import ROOT, program
from tests.support.waiting import eventually

BASE = "localhost/histospec-base"
IMAGE = "localhost/histospec"
WORKER_BASE = "localhost/vllm"
WORKER_IMAGE = "localhost/histospec-worker"
# The Debian packages of the official image. Debian has no Python 3.12; the pinned versions are for 3.12 and later. The
# last two are for the workers.
SUITE = "trixie"
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates,python3-pip,python3-numpy"
DOCKERFILES = ("Dockerfile", "deploy/worker.Dockerfile")
PROGRAMS = ("buildah", "podman", "crun", "debootstrap", "unshare", "nsenter")
# Without control groups of its own, a container needs limits that this machine allows.
LIMITS = ("--cgroups", "disabled", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
PIP_CONFIGURATIONS = ("~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf")

asked_for = pytest.mark.skipif(os.environ.get("HISTOSPEC_TEST_IMAGE") != "1", reason="takes minutes: make test-image")


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_hadolint_has_nothing_to_say(dockerfile: str) -> None:
    done = subprocess.run([program("hadolint"), ROOT / dockerfile], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_is_pinned_by_its_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+:3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}


def test_the_workers_get_the_vllm_that_is_tested() -> None:
    (tested,) = re.findall(r"^VLLM_NEW := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.search(rf"^ARG VLLM=v{tested}$", (ROOT / "deploy/worker.Dockerfile").read_text(), re.MULTILINE)


class Engine:
    """buildah and podman with their own storage, in a mount namespace with the cgroups that podman needs."""

    def __init__(self, folder: Path) -> None:
        self._storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        hold = "mount -t cgroup2 none /sys/fs/cgroup && echo there && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", hold], stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "there\n":
            pytest.skip("podman needs a cgroup2 file system, which cannot be mounted here")
        self._inside = ["nsenter", "--mount", "--target", str(self._holder.pid)]

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def buildah(self, *words: object) -> str:
        command = [*self._inside, "buildah", *self._storage, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def build(self, dockerfile: str, image: str, **arguments: str) -> None:
        configurations = [path for path in map(os.path.expanduser, PIP_CONFIGURATIONS) if os.path.exists(path)]
        secret = [f"--secret=id=pip,src={path}" for path in configurations[:1]]
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        # In docker's format, since OCI's has no HEALTHCHECK. The certificates are those of this machine's way out.
        self.buildah(
            "bud", "--format", "docker", "--isolation", "chroot", "--network", "host", "--pull-never",
            "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", *secret, *given, "--file", ROOT / dockerfile,
            "--tag", image, ROOT,
        )  # fmt: skip

    def podman(self, *words: str) -> list[str]:
        options = ["--runtime", "crun", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]
        return [*self._inside, "podman", *self._storage, *options, *words]


class Container:
    """The image as the chart runs it: only loopback, and only /data and /tmp are writable."""

    def __init__(self, engine: Engine, *command: str) -> None:
        self._engine = engine
        hardened = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--cap-drop", "ALL",
                    "--security-opt", "no-new-privileges")  # fmt: skip
        words = ("run", "--name", "shard", "--network", "none", *hardened, *LIMITS, IMAGE, *command)
        self.process = subprocess.Popen(engine.podman(*words), stderr=subprocess.PIPE, text=True)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = self._engine.podman("exec", "shard", *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def well(self) -> bool:
        command = self._engine.podman("healthcheck", "run", "shard")
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def remove(self) -> None:
        subprocess.run(self._engine.podman("rm", "--force", "--volumes", "shard"), capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Returns the environment with the images built from the Dockerfiles."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and {', '.join(missing) or 'every program'} (apt-get install {' '.join(missing)})")
    folder = tmp_path_factory.mktemp("image")
    engine = Engine(folder)
    try:
        root = folder / "root"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, root], check=True)
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        base = engine.buildah("from", "scratch")
        engine.buildah("add", "--quiet", base, root, "/")
        engine.buildah("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", base)
        engine.buildah("commit", "--quiet", base, BASE)
        engine.build("Dockerfile", IMAGE, BASE=BASE)
        engine.buildah("config", "--entrypoint", '["vllm", "serve"]', base)
        engine.buildah("commit", "--quiet", base, WORKER_BASE)
        engine.build("deploy/worker.Dockerfile", WORKER_IMAGE, BASE=WORKER_BASE)
        yield engine
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def container(engine: Engine) -> Iterator[Container]:
    container = Container(engine, "serve", "--insecure", "--memory", "64MiB")
    yield container
    container.remove()
    container.process.wait(60)


@asked_for
@pytest.mark.timeout(3600)
def test_it_runs_as_nobody_on_a_root_that_cannot_be_written(container: Container) -> None:
    eventually(container.well, "the health check never passed")
    assert container.run("id", "-u").stdout == "65532\n"
    assert "Read-only file system" in container.run("touch", "/opt/histospec/x").stderr
    assert container.run("touch", "/data/x").returncode == 0
    for compiler in ("gcc", "g++", "cc", "cmake", "ninja", "make"):
        assert container.run("sh", "-c", f"command -v {compiler}").returncode != 0, f"{compiler} is in the image"
    assert "MALLOC_TOP_PAD_=16777216\n" in container.run("env").stdout
    status = container.run("histospec", "status", "127.0.0.1:6378")
    assert status.returncode == 0, status.stderr
    assert "SERVING" in status.stdout


@asked_for
@pytest.mark.timeout(3600)
def test_what_is_installed_is_what_is_pinned(container: Container) -> None:
    eventually(container.well, "the health check never passed")
    listed = container.run("pip", "list", "--format", "json")
    installed = {str(canonicalize_name(found["name"])): found["version"] for found in json.loads(listed.stdout)}
    del installed["pip"], installed["histospec"]
    pinned = {name: version(requirement) for name, (requirement, _) in pins(lock.IMAGE).items()}
    assert installed == pinned
    refused = container.run("histospec", "replay", "absent.jsonl", "--plot", "x.png")
    assert 'a plot needs matplotlib: pip install "histospec[replay]"' in refused.stderr


WORKER = """
import json
from histospec.client import DraftClient, Response
with DraftClient("127.0.0.1:6378", namespace="run", deadline=30) as client:
    client.ingest([1, 2, 3], [Response(list(range(64)))], epoch=0)
    sessions = client.open([[1, 2, 3]])
    client.step(sessions, [[0]])
    print("begun", flush=True)
    input()
    drafted = sum(len(draft.tokens) > 0 for token in range(1, 41) for draft in client.step(sessions, [[token]]))
    stats = client.stats()
    print(json.dumps([drafted, stats.late, stats.failed, stats.reopened]), flush=True)
    client.close(sessions, commit=True)
    client.flush(30)
"""


@asked_for
@pytest.mark.timeout(3600)
def test_sigterm_drains_without_dropping_a_stream(engine: Engine, container: Container) -> None:
    eventually(container.well, "the health check never passed")
    command = engine.podman("exec", "--interactive", "shard", "python", "-c", WORKER)
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "begun\n"
    subprocess.run(engine.podman("kill", "--signal", "TERM", "shard"), check=True, capture_output=True, timeout=60)
    eventually(lambda: not container.well(), "the drain never showed")
    answer, _ = worker.communicate("go on\n", timeout=60)
    drafted, late, failed, reopened = json.loads(answer)
    assert (late, failed, reopened) == (0, 0, 0)
    assert drafted > 30
    _, log = container.process.communicate(timeout=60)
    assert container.process.returncode == 0
    podmans_own = 'time="'  # podman's own lines, for example that there is no systemd; the test checks health itself
    events = [json.loads(line) for line in log.splitlines() if not line.startswith(podmans_own)]
    assert events[-1]["event"] == "stopped"
    assert any(event.get("committed") == 1 for event in events), events


def in_worker(engine: Engine, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command in a new container of the workers' image, without a network."""
    command = engine.podman(
        "run", "--rm", "--network", "none", *LIMITS, "--entrypoint", words[0], WORKER_IMAGE, *words[1:]
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@asked_for
@pytest.mark.timeout(3600)
def test_the_workers_image_is_its_base_and_the_client(engine: Engine) -> None:
    entry = json.loads(engine.buildah("inspect", "--type", "image", WORKER_IMAGE))["Docker"]["config"]["Entrypoint"]
    assert entry == ["vllm", "serve"], "of the base"
    listed = in_worker(engine, "python3", "-m", "pip", "list", "--format", "json")
    installed = {str(canonicalize_name(found["name"])): found["version"] for found in json.loads(listed.stdout)}
    assert installed["histospec"] == package_version()
    asked = in_worker(engine, "python3", "-c", "import numpy; print(numpy.__file__)").stdout
    assert asked.startswith("/usr/lib/"), "pip replaced the numpy of the base"
    assert "No module named 'histospec.server'" in in_worker(engine, "python3", "-c", "import histospec.server").stderr
    assert in_worker(engine, "ls", "/wheels", "/src").stdout == ""
    doctor = in_worker(engine, "python3", "-m", "histospec.client.doctor", "--endpoint=127.0.0.1:1", "--namespace=x")
    assert doctor.returncode == 1, doctor.stderr
    assert "127.0.0.1:1" in doctor.stdout
