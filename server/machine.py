"""What this process may use of its machine: the least limit of its control groups (version 2), or all there is."""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Bytes that it may hold."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min([machine, *_limits("memory.max", int, cgroups, membership)]))


def group_memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """The same by its control groups alone, in bytes; None where none of them has a limit."""
    limits = list(_limits("memory.max", int, cgroups, membership))
    return int(min(limits)) if limits else None


def volume_bytes(path: Path) -> int:
    """The size of the volume that a path is on, or will be once it is made; 0 where nobody knows."""
    for place in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).total
    return 0


def cpu_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """CPUs that it may keep busy at a time, at least 1; of a fraction, those that are whole."""
    machine = len(os.sched_getaffinity(0))
    return max(1, int(min([machine, *_limits("cpu.max", _cpus, cgroups, membership)])))


def raise_descriptor_limit() -> int:
    """Lets the process open as many files and sockets as its hard limit allows; returns how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _cpus(text: str) -> float:
    microseconds, period = text.split()
    return int(microseconds) / int(period)


def _limits(file: str, read: Callable[[str], float], cgroups: Path, membership: Path) -> Iterator[float]:
    """That of each group that this process is in and that has one."""
    try:
        names = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        names = []
    for name in names:
        group = cgroups / name.lstrip("/")
        while group.is_relative_to(cgroups):
            with suppress(OSError, ValueError):  # no such group here, or no limit: "max"
                yield read((group / file).read_text())
            group = group.parent
