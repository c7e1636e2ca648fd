"""Pins the packages of the image with hashes: `python -m scripts.lock [--upgrade]` writes requirements/*.txt with uv.

requirements/image.txt has the server's dependencies and theirs, requirements/build.txt those that build the wheel. A
pinned version stays, unless `--upgrade` is given or pyproject.toml no longer allows it.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "requirements" / "image.txt"
BUILD = ROOT / "requirements" / "build.txt"
PYTHON = "3.12"
"""Python of the image; the pins are also valid for later versions."""
PLATFORMS = ("x86_64-manylinux_2_36", "aarch64-manylinux_2_36")
"""Platforms of the image, with the glibc of its base."""
EXTRAS = ("server", "otel", "backup")
"""Extras that the image has: those that a server uses."""


def image_requirements() -> list[Requirement]:
    """Returns what pyproject.toml asks for in the image: the dependencies, and the extras that a server uses."""
    project = pyproject()["project"]
    extras = (line for name in EXTRAS for line in project["optional-dependencies"][name])
    return _here([*project["dependencies"], *extras])


def build_requirements() -> list[Requirement]:
    """Returns what pyproject.toml builds the wheel with."""
    return _here(pyproject()["build-system"]["requires"])


def pyproject() -> dict[str, Any]:
    """Returns the content of pyproject.toml."""
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return content


def _here(lines: list[str]) -> list[Requirement]:
    """Returns the requirements that hold for the image's Python."""
    found = map(Requirement, lines)
    return [r for r in found if r.marker is None or r.marker.evaluate({"python_version": PYTHON})]


def pin(requirements: list[Requirement], to: Path, *options: str) -> None:
    """Resolves the requirements for every platform, with wheels only, because a source would need unpinned packages.

    Raises:
        subprocess.CalledProcessError: uv found no compatible versions; its output says why.

    """
    command: list[str | Path] = [
        "uv", "pip", "compile", "-", "--output-file", to, "--universal", "--python-version", PYTHON, "--only-binary",
        ":all:", "--generate-hashes", "--no-config", "--quiet", "--custom-compile-command", "make lock", *options,
    ]  # fmt: skip
    lines = "\n".join(f"{requirement.name}{requirement.specifier}" for requirement in requirements)
    subprocess.run(command, input=lines, text=True, check=True)


def check(pinned: Path, platform: str) -> None:
    """Lets uv plan an installation of the pins, without downloading them.

    Raises:
        subprocess.CalledProcessError: a package has no wheel for this platform, or no hash; uv's output says which.

    """
    with tempfile.TemporaryDirectory() as folder:
        command: list[str | Path] = [
            "uv", "pip", "install", "--dry-run", "--target", folder, "--require-hashes", "--requirements", pinned,
            "--python-platform", platform, "--python-version", PYTHON, "--only-binary", ":all:", "--no-config",
            "--quiet",
        ]  # fmt: skip
        subprocess.run(command, check=True)


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="use the newest compatible versions")
    options = ["--upgrade"] if parser.parse_args().upgrade else []
    for requirements, to in ((image_requirements(), IMAGE), (build_requirements(), BUILD)):
        pin(requirements, to, *options)
        for platform in PLATFORMS:
            check(to, platform)


if __name__ == "__main__":
    main()
