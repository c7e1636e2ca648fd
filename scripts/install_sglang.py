"""Installs SGLang over the CPU build of torch of another virtual environment.

    python -m scripts.install_sglang VERSION VENV BASE

SGLang requires a CUDA build of torch and 10 GB of kernels, which a scheduler on a CPU never calls. So this installs
SGLang without its dependencies, then those that it imports and BASE lacks. tests/sglang/testbed takes the place of the
kernels.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

# What the engine imports and BASE lacks.
NEEDED = ["gguf", "IPython", "orjson", "zstandard"]


def main() -> None:
    """Sets the environment up; exits with pip's output if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of sglang, such as 0.5.23")
    parser.add_argument("venv", type=Path, help="the environment; created if it does not exist")
    parser.add_argument("base", type=Path, help="the environment with torch")
    arguments = parser.parse_args()

    python = arguments.venv / "bin" / "python"
    if not python.exists():
        venv.create(arguments.venv, with_pip=True)

    def ask(python: Path, code: str) -> str:
        return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, base = Path(ask(python, purelib)), ask(arguments.base / "bin" / "python", purelib)
    # addsitedir instead of a plain path, so that Python also reads the .pth files of BASE (editable installs).
    (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")

    def pip(*args: str) -> None:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}")

    pip("--no-deps", f"sglang=={arguments.version}")
    pip(*NEEDED)


if __name__ == "__main__":
    main()
