"""Installs SGLang over the CPU build of torch of another virtual environment.

    python -m scripts.install_sglang VERSION VENV BASE

SGLang requires a CUDA build of torch and 10 GB of kernels, which a scheduler on a CPU never calls. So this installs
SGLang without its dependencies, then those that it imports and BASE lacks. tests/sglang/testbed takes the place of the
kernels.
"""

import argparse
from pathlib import Path

from scripts.environments import Environment

# What the engine imports and BASE lacks.
NEEDED = ["gguf", "IPython", "orjson", "zstandard"]

# What older releases need in place of BASE's.
OLDER = {"0.5.15.post1": ["transformers==5.12.1", "tokenizers==0.22.2", "huggingface-hub==1.33.0"]}


def main() -> None:
    """Sets the environment up; exits with pip's output if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of sglang, such as 0.5.23")
    parser.add_argument("venv", type=Path, help="the environment; created if it does not exist")
    parser.add_argument("base", type=Path, help="the environment with torch")
    arguments = parser.parse_args()

    environment = Environment(arguments.venv)
    environment.see(Environment(arguments.base), editable=True)
    environment.pip("install", "--no-deps", f"sglang=={arguments.version}", *OLDER.get(arguments.version, []))
    environment.pip("install", *NEEDED)


if __name__ == "__main__":
    main()
