"""A release has one version: in the package, the chart, the manifests and the pages."""

import re
import shutil
from pathlib import Path

import pytest

from scripts import release


def test_every_place_has_the_version_of_the_package() -> None:
    assert release.disagreements() == []
    named = {found.file.relative_to(release.ROOT).parts[0] for found in release.mentions()}
    assert named >= {"pyproject.toml", "helm", "deploy", "docs"}


def test_the_changelog_is_in_the_form_of_keep_a_changelog() -> None:
    text = release.CHANGELOG.read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version), version
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that name a version; `release` works there."""
    for file in {found.file for found in release.mentions()} | {release.CHANGELOG}:
        to = tmp_path / file.relative_to(release.ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "CHANGELOG", tmp_path / "CHANGELOG.md")
    monkeypatch.setattr(release, "PYPROJECT", tmp_path / "pyproject.toml")
    return tmp_path


def test_a_release_writes_its_version_everywhere(copy: Path) -> None:
    before = len(list(release.mentions()))
    release.write("12.0.3")
    assert {found.version for found in release.mentions()} == {"12.0.3"}
    assert len(list(release.mentions())) == before > 20
    assert release.disagreements() == []
    release.date_changelog("12.0.3")
    changelog = (copy / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]\n\n## \[12\.0\.3\] - \d{4}-\d\d-\d\d\n", changelog, re.MULTILINE)
    release.date_changelog("12.0.3")
    assert (copy / "CHANGELOG.md").read_text() == changelog


def test_a_place_with_another_version_is_named(copy: Path) -> None:
    chart = copy / "helm/histospec/Chart.yaml"
    version = release.package_version()
    chart.write_text(chart.read_text().replace(f"appVersion: {version}", "appVersion: 99.0.0"))
    (sentence,) = release.disagreements()
    assert re.fullmatch(rf"helm/histospec/Chart\.yaml:\d+: 99\.0\.0; pyproject\.toml has {version}", sentence)
