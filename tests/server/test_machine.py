"""The resources of the process under limits of control groups."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from histospec.server.machine import cpu_limit, drafting_threads, group_memory_limit, memory_limit


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, tuple[Path, Path]]:
    """Returns the group pods/one of a process, and the arguments that name it."""
    group = tmp_path / "fs" / "pods" / "one"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/pods/one\n")
    return group, (tmp_path / "fs", tmp_path / "cgroup")


def test_the_least_memory_of_the_control_groups_counts(groups: tuple[Path, tuple[Path, Path]], tmp_path: Path) -> None:
    group, here = groups
    machine = memory_limit(*here)
    assert machine > 1 << 20
    assert group_memory_limit(*here) is None
    (group / "memory.max").write_text("max\n")
    assert (memory_limit(*here), group_memory_limit(*here)) == (machine, None)
    (group / "memory.max").write_text(f"{machine + 1}\n")
    assert (memory_limit(*here), group_memory_limit(*here)) == (machine, machine + 1)
    (group.parent / "memory.max").write_text("1048576\n")
    assert memory_limit(*here) == group_memory_limit(*here) == 1 << 20
    assert memory_limit(tmp_path / "fs", tmp_path / "absent") == machine


def test_a_control_group_without_a_limit_has_none(groups: tuple[Path, tuple[Path, Path]]) -> None:
    group, here = groups
    for file, text, limit in (
        (group, None, None), (group, "max", None), (group, "8388608", 8 << 20), (group.parent, "4194304", 4 << 20)
    ):  # fmt: skip
        if text:
            (file / "memory.max").write_text(f"{text}\n")
        assert group_memory_limit(*here) == limit


def test_the_least_quota_of_the_control_groups_counts(groups: tuple[Path, tuple[Path, Path]], tmp_path: Path) -> None:
    group, here = groups
    machine = len(os.sched_getaffinity(0))
    assert cpu_limit(*here) == machine
    (group / "cpu.max").write_text("max 100000\n")
    assert cpu_limit(*here) == machine
    (group / "cpu.max").write_text(f"{100000 * (machine + 8)} 100000\n")
    assert cpu_limit(*here) == machine
    for quota in ("150000 100000", "50000 50000", "10000 100000"):  # a fraction of a CPU keeps no thread busy
        (group.parent / "cpu.max").write_text(f"{quota}\n")
        assert cpu_limit(*here) == 1
    assert cpu_limit(tmp_path / "fs", tmp_path / "absent") == machine


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3), (8, 4), (9, 4), (128, 4)]
)
def test_the_threads_that_draft_follow_the_cpus(cpus: int, threads: int) -> None:
    assert drafting_threads(cpus) == threads


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no GNU C library")
def test_freed_memory_is_used_again_without_a_page_fault() -> None:
    lines = (
        "import resource, sys",
        "from histospec.server.machine import keep_freed_memory",
        "if sys.argv[1] == 'keep': keep_freed_memory()",
        "before = 0",
        "for number in range(20):",
        "    before = before or (resource.getrusage(resource.RUSAGE_SELF).ru_minflt if number == 4 else 0)",
        "    held = [bytes(3 << 20) for _ in range(4)]",
        "    del held",
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)",
    )

    def faults(choice: str) -> int:
        done = subprocess.run([sys.executable, "-c", "\n".join(lines), choice], capture_output=True, check=True)
        return int(done.stdout)

    assert faults("keep") < faults("give back") / 4
