"""The resources that this process may use: the lowest limit of its control groups (version 2), or the whole machine."""

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MOST_DRAFTING = 4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = MAPPED_BYTES = 32 << 20
"""Free memory that each arena of the allocator keeps, and the size from which an allocation is a mapping of its own.

32 MiB is the largest size for a mapping that the C library accepts.
"""


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns the memory limit in bytes."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min([machine, *_limits("memory.max", int, cgroups, membership)]))


def group_memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Returns the memory limit of the control groups alone, in bytes; None if none of them has one."""
    limits = list(_limits("memory.max", int, cgroups, membership))
    return int(min(limits)) if limits else None


def free_bytes(path: Path) -> int:
    """Returns the free space of the volume of a path, which need not exist yet; 0 if it is unknown."""
    for folder in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0


def cpu_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns how many CPUs the process may keep busy, rounded down, at least 1."""
    machine = len(os.sched_getaffinity(0))
    return max(1, int(min([machine, *_limits("cpu.max", _cpus, cgroups, membership)])))


def drafting_threads(cpus: int) -> int:
    """Returns how many threads draft by default: both of two CPUs, half of more CPUs, at most MOST_DRAFTING.

    The other half is for the engine that shares the machine, the builder, the store, gRPC and other shards. A step of
    256 sessions spends about a fifth of its time outside the parallel part, so further threads gain little.
    """
    return min(cpus, max(2, min(MOST_DRAFTING, cpus // 2)))


def raise_descriptor_limit() -> int:
    """Raises the limit of open files and sockets to the hard limit. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS allows less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def keep_freed_memory() -> None:
    """Has the GNU C library keep some freed memory, which it would give back to the kernel after each large message.

    The kernel maps and zeroes the memory that it gives. While messages of 3 MiB arrived, that was a sixth of the event
    loop's CPU time.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def _cpus(text: str) -> float:
    microseconds, period = text.split()
    return int(microseconds) / int(period)


def _limits(file: str, read: Callable[[str], float], cgroups: Path, membership: Path) -> Iterator[float]:
    """Yields the limit of each control group of this process that has one."""
    try:
        names = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        names = []
    for name in names:
        group = cgroups / name.lstrip("/")
        while group.is_relative_to(cgroups):
            with suppress(OSError, ValueError):  # the group does not exist here, or has no limit ("max")
                yield read((group / file).read_text())
            group = group.parent
