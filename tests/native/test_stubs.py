"""The hand-written stub says what the compiled module is. Takes about 10 s."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_agrees_with_the_module() -> None:
    # Names, keyword-only markers and defaults; the texts of the arguments are checked by the calls in test_contract.
    command = [sys.executable, "-m", "mypy.stubtest", "--mypy-config-file", "pyproject.toml", "histospec.native._core"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
