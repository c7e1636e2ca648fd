"""Pins the packages of the image with hashes: `python -m scripts.lock [--upgrade]` writes requirements/*.txt with uv.

requirements/image.txt has the server's dependencies and theirs, requirements/build.txt those that build the wheel. A
pinned version stays, unless `--upgrade` is given or setup.py no longer allows it.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

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
ELSEWHERE = {"replay"}
"""Extras that the image does not have. It has all others."""


def image_requirements() -> list[Requirement]:
    """Returns the requirements of the image from setup.py: the dependencies, and the extras that a server uses.

    Raises:
        subprocess.CalledProcessError: setup.py failed.

    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (info,) = Path(folder).glob("*.dist-info")
        declared = [Requirement(line) for line in importlib.metadata.PathDistribution(info).requires or ()]
        extras = set(importlib.metadata.PathDistribution(info).metadata.get_all("Provides-Extra") or ()) - ELSEWHERE
    environments = [{"python_version": PYTHON, "extra": extra} for extra in ("", *sorted(extras))]
    return [r for r in declared if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def build_requirements() -> list[Requirement]:
    """Returns the build requirements of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [Requirement(line) for line in project["build-system"]["requires"]]


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
