"""clang finds uses of the engine's parts without the lock (`make check` runs it on the engine itself)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIDY = shutil.which("clang-tidy", path=Path(sys.executable).parent)
CODE = """
#include "registry/registry.h"

namespace histospec {{
std::size_t problems(Monitor& monitor, const Namespace& namespace_) {{
  {before}
  return namespace_.problems.size();
}}
}}  // namespace histospec
"""


def complaints(tmp_path: Path, before: str) -> str:
    source = tmp_path / "code.cc"
    source.write_text(CODE.format(before=before))
    flags = ["-std=c++20", "-Wthread-safety", f"-I{ROOT}/native/include", f"-I{ROOT}/native/src"]
    command = [str(TIDY), f"--config-file={ROOT}/.clang-tidy", "-quiet", str(source), "--", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode == 0) == (ran.stdout == ""), ran.stderr
    return ran.stdout


@pytest.mark.skipif(TIDY is None, reason="needs clang-tidy beside this Python")
@pytest.mark.parametrize(
    ("before", "complaint"),
    [
        ("const Monitor::Lock lock(monitor);", ""),
        ("(void)monitor;", "requires holding mutex 'engine_lock'"),
        ("Monitor::Lock lock(monitor); const Monitor::Unlocked others(lock);", "requires holding mutex 'engine_lock'"),
    ],
    ids=["locked", "not locked", "locked and released"],
)
def test_the_lock_is_missed(tmp_path: Path, before: str, complaint: str) -> None:
    found = complaints(tmp_path, before)
    assert complaint in found
    assert bool(found) == bool(complaint)
