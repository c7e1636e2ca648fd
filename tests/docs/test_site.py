"""What readers look for: the reference begins with the client, versions are those that tests run, headings."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import histospec.client
from tests.support.programs import ROOT

VERSIONS = ROOT / "docs" / "vllm-versions.md"


def test_the_reference_of_the_client_begins_with_draft_client() -> None:
    docs_site = pytest.importorskip("scripts.docs_site", reason="needs mkdocs")
    _, _, listed = docs_site.client_first().partition("members:")
    members = re.findall(r"- (\w+)", listed)
    assert members[:2] == ["DraftClient", "AsyncDraftClient"]
    assert sorted(members) == sorted(name for name in histospec.client.__all__ if not name.startswith("_"))


def states() -> list[tuple[str, str]]:
    """Each release of vLLM, such as 0.32, and what the page says of it."""
    return re.findall(r"^\| (\d\.\d+)\.\d+ \| [^|]+ \| ([^|]+) \|", VERSIONS.read_text(), re.M)


def test_coupled_sampling_names_the_tested_versions() -> None:
    (row,) = re.findall(r"^\| vLLM (.*?) \(tested", (ROOT / "docs" / "coupled.md").read_text(), re.M)
    v1, _, v2 = row.partition(" with model runner V1")
    assert set(re.findall(r"\d\.\d+", v1)) == {version for version, state in states() if state == "**tested**"}
    assert {version for version, state in states() if "**tested** with V2" in state} <= set(re.findall(r"\d\.\d+", v2))


def test_the_page_says_whether_the_vllm_of_verl_s_image_is_run() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (minor,) = set(re.findall(r"verlai/verl:vllm0(\d+)", text + (ROOT / "deploy" / "worker.Dockerfile").read_text()))
    assert f"vLLM 0.{minor}, which no test runs" in text
    assert (f"0.{minor}", "sources agree") in states()


def test_make_test_says_first_what_it_installs_as_root(tmp_path: Path) -> None:
    said = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.stdout.splitlines()[0] == "scripts/install-tools --say"
    # A machine of root with apt-get and none of the programs.
    for name in ("bash", "dirname", "id"):
        (tmp_path / name).symlink_to(next(p for p in (Path("/usr/bin") / name, Path("/bin") / name) if p.exists()))
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\nexit 1\n")
    apt.chmod(0o755)
    words = [str(tmp_path / "bash"), str(ROOT / "scripts" / "install-tools"), "--say"]
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if os.geteuid() == 0:
        assert re.match(r"installs with apt-get, as root: .*\bredis-server\b.*\bprometheus\b", done.stdout)


def test_what_people_look_for_is_a_heading() -> None:
    """The site's search ranks headings far above text."""
    assert re.search(r"^#+ Rotate a token$", (ROOT / "docs" / "security.md").read_text(), re.M)
