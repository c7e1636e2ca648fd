"""The files of deploy/: rendered ones are up to date, and tools accept the others."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from histospec.client import DraftClient, Response
from histospec.server import cli
from histospec.server.settings.options import load
from tests.support import syscall_filter
from tests.support.charts import objects_in, one
from tests.support.clients import texts
from tests.support.examples import example
from tests.support.programs import ROOT, program
from tests.support.prometheus import promtool
from tests.support.servers import Starter, run_first

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "histospec.service"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def test_manifests_are_up_to_date(tmp_path: Path) -> None:
    program("helm")
    subprocess.run([ROOT / "scripts" / "render-manifests", tmp_path], check=True, timeout=120)
    rendered = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml")}
    assert {Path("deploy/kubernetes/statefulset.yaml"), Path("deploy/kubernetes/daemonset.yaml")} <= rendered
    for path in rendered:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is old; make manifests"


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_kubernetes_takes_the_manifests(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    manifests = objects_in(path.read_text())
    assert manifests
    for manifest in manifests:
        assert "namespace" not in manifest["metadata"], "so that they go wherever kubectl -n says"
        kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_the_sidecar_speaks_to_its_neighbour() -> None:
    worker, shard = one(example("sidecar.yaml"), "Pod")["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in worker["env"]}
    assert shard["args"][0] == "serve"
    assert environment["HISTOSPEC_ENDPOINT"] == str(load(shard["args"][1:]).listen)


def test_prometheus_takes_its_configuration() -> None:
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yaml"))


def test_compose_mounts_what_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert (DEPLOY / compose["services"]["histospec"]["build"] / "Dockerfile").exists()
    for name, service in compose["services"].items():
        for volume in service["volumes"]:
            source, _, target = volume.partition(":")
            assert source in compose["volumes"] or (DEPLOY / source).exists(), (name, source)
            assert target.startswith("/")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


@pytest.mark.parametrize("profile", [(), ("--profile", "redis")])
def test_docker_compose_takes_its_file(profile: tuple[()] | tuple[str, str]) -> None:
    words = [program("docker-compose"), "--file", DEPLOY / "compose.yaml", *profile, "config", "--services"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"histospec", "prometheus"} | set(profile[1:])


def test_the_server_takes_what_compose_gives_it(start_server: Starter) -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["histospec"]
    word, *flags = service["command"]
    assert word == "serve"
    defaults = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value) for name, value in service["environment"].items()}
    server = start_server(*flags, env=defaults)
    server.drain()


def test_the_server_takes_the_options_of_the_unit(start_server: Starter) -> None:
    server = start_server("--config", str(DEPLOY / "systemd" / "histospec.toml"))
    server.drain()


def test_the_server_runs_with_the_system_calls_of_the_unit(
    start_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze = program("systemd-analyze")
    try:
        ctypes.CDLL(syscall_filter.LIBRARY)
    except OSError:
        pytest.skip(f"needs {syscall_filter.LIBRARY}")
    restrict = f"runpy.run_path({syscall_filter.__file__!r})['restrict'](pathlib.Path({str(UNIT)!r}), {analyze!r})"
    run_first(f"import pathlib, runpy\n{restrict}", tmp_path, monkeypatch)  # also before numpy is imported
    server = start_server("--config", str(DEPLOY / "systemd" / "histospec.toml"), name="data")
    assert "Seccomp:\t2\n" in Path(f"/proc/{server.pid}/status").read_text()
    with DraftClient(server.endpoint, "run") as client:
        client.ingest([1, 2], [Response([3, 4])])
        assert cli.main(["status", server.endpoint, "--http", server.http]) == 0
        server.drain()
        server.start()
        assert texts(client.history([1, 2])) == [[3, 4]]
    server.drain()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    unit = tmp_path / "histospec.service"
    unit.write_text(UNIT.read_text().replace("/opt/histospec/bin/histospec", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    # 10 is a service without restrictions; systemd calls up to 2 "OK" and better.
    safe = [analyze, "security", "--offline=true", "--threshold=20", str(unit)]
    done = subprocess.run(safe, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


def test_the_image_is_built_of_all_folders_of_the_package() -> None:
    folders = set(re.findall(r'^ +"histospec\.[a-z0-9_.]+": "([a-z0-9_]+)', (ROOT / "setup.py").read_text(), re.M))
    assert folders >= {"client", "native", "protos", "server"}
    assert folders <= set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.M))
