"""Programs that tests run. A test skips where its program is absent."""

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANE = ROOT / "build" / "control-plane"
TOOLS = ROOT / "build" / "tools" / "node_modules"
FOLDERS = (
    os.environ.get("KUBEBUILDER_ASSETS", ""), str(PLANE), str(TOOLS / ".bin"), os.environ.get("PATH", os.defpath),
    str(Path(sys.executable).parent), "/usr/sbin", "/sbin",
)  # fmt: skip
PATH = os.pathsep.join(filter(None, FOLDERS))


def program(name: str) -> str:
    """The path of a program; skips the test where there is none."""
    path = shutil.which(name, path=PATH)
    if path is None:
        pytest.skip(f"needs {name}: make setup, scripts/install-tools or scripts/install-control-plane may install it")
    return path
