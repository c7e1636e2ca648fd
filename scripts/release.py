"""Keeps one version everywhere: `python -m scripts.release 0.3.0` writes it, without a version it checks.

The version of a release stands in the package, in the chart (its own version and the image that it installs), in the
manifests, in the pages that show an image or a log line, and as the newest section of CHANGELOG.md.
"""

import argparse
import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHANGELOG = ROOT / "CHANGELOG.md"
PYPROJECT = ROOT / "pyproject.toml"
VERSION = r"\d+\.\d+\.\d+"

PLACES = {
    "pyproject.toml": [rf'^version = "({VERSION})"$'],
    "helm/histospec/Chart.yaml": [rf"^version: ({VERSION})$", rf"^appVersion: ({VERSION})$"],
    "deploy/**/*.yaml": [rf"\bhistospec(?:-worker)?:({VERSION})\b", rf"^ +app\.kubernetes\.io/version: ({VERSION})$"],
    "README.md": [rf"\bhistospec:({VERSION})\b"],
    "docs/**/*.md": [
        rf"\bhistospec(?:-worker)?:({VERSION})\b",
        rf"\bserver ({VERSION}), client {VERSION}$",
        rf"\bserver {VERSION}, client ({VERSION})$",
        rf"/charts/histospec --version ({VERSION})\b",
        rf"^HistoSpec: connected to \S+ \(({VERSION})\)",
    ],
}
"""Where a version stands: files, and patterns whose group is the version."""


class Mention(NamedTuple):
    """A version in a file: characters `start` to `end` of its text."""

    file: Path
    line: int
    start: int
    end: int
    version: str


def mentions() -> Iterator[Mention]:
    """Yields every place that names the version of a release."""
    for files, patterns in PLACES.items():
        for file in sorted(ROOT.glob(files)):
            text = file.read_text()
            for pattern in patterns:
                for found in re.finditer(pattern, text, re.MULTILINE):
                    yield Mention(file, text.count("\n", 0, found.start(1)) + 1, *found.span(1), found[1])


def package_version() -> str:
    """Returns the version in pyproject.toml."""
    return next(found.version for found in mentions() if found.file == PYPROJECT)


def disagreements() -> list[str]:
    """Returns a sentence for each place whose version is not the package's."""
    version = package_version()
    return [
        f"{found.file.relative_to(ROOT)}:{found.line}: {found.version}; pyproject.toml has {version}"
        for found in mentions()
        if found.version != version
    ]


def write(version: str) -> None:
    """Writes the version everywhere, except in CHANGELOG.md."""
    spans: dict[Path, set[tuple[int, int]]] = {}
    for found in mentions():
        spans.setdefault(found.file, set()).add((found.start, found.end))
    for file, places in spans.items():
        text = file.read_text()
        for start, end in sorted(places, reverse=True):
            text = text[:start] + version + text[end:]
        file.write_text(text)


def date_changelog(version: str) -> None:
    """Moves what CHANGELOG.md has under Unreleased below a heading with the version and today's date."""
    text = CHANGELOG.read_text()
    heading = f"## [{version}] - {datetime.datetime.now(datetime.timezone.utc).date()}"
    if f"## [{version}]" not in text:
        CHANGELOG.write_text(text.replace("## [Unreleased]\n", f"## [Unreleased]\n\n{heading}\n", 1))


def main() -> int:
    """Returns the exit code: 0 if every place has one version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="of the next release, such as 0.3.0; without it, only check")
    parser.add_argument("--undated", action="store_true", help="leave CHANGELOG.md; the version is not released yet")
    parser.add_argument("--tag", help="check that the git tag names the version, such as v0.3.0")
    options = parser.parse_args()
    version = options.version
    if version is not None:
        if not re.fullmatch(VERSION, version):
            parser.error(f"version is {version!r}; must be of the form MAJOR.MINOR.PATCH")
        write(version)
        if not options.undated:
            date_changelog(version)
    wrong = disagreements()
    if options.tag not in (None, f"v{package_version()}"):
        wrong.append(f"the tag is {options.tag}; pyproject.toml has {package_version()}")
    for sentence in wrong:
        sys.stderr.write(f"{sentence}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
