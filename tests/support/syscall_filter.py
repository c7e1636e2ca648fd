"""The system calls that a systemd unit allows its service, as a filter of the kernel for the calling process."""

import ctypes
import errno
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "libseccomp.so.2"
KILL, ERROR, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
"""Actions of libseccomp. The low bits of ERROR hold the errno."""


def restrict(unit: Path, analyze: str = "systemd-analyze") -> None:
    """Restricts this process, as systemd does before it starts the service. Raises OSError if that is impossible."""
    lines = [line.partition("=")[::2] for line in unit.read_text().splitlines()]
    refused = next((ERROR | getattr(errno, value) for key, value in lines if key == "SystemCallErrorNumber"), KILL)
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(refused)))
    for name in _allowed([value for key, value in lines if key == "SystemCallFilter"], _groups(analyze)):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # others belong to other processors
            library.seccomp_rule_add(context, ctypes.c_uint32(ALLOW), number, 0)
    if failed := library.seccomp_load(context):
        raise OSError(-failed, os.strerror(-failed))


def _groups(analyze: str) -> dict[str, list[str]]:
    """Returns the members of each group of system calls, which may be groups themselves."""
    command = [analyze, "--no-pager", "syscall-filter"]
    groups: dict[str, list[str]] = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines():
        if line.startswith("@"):
            members = groups[line] = []
        elif line.startswith(" ") and not line.strip().startswith("#"):
            members.append(line.strip())
    return groups


def _allowed(filters: Sequence[str], groups: dict[str, list[str]]) -> set[str]:
    """Returns the system calls that the lines of a unit allow. The first line allows, those with a tilde take away."""

    def expand(name: str) -> set[str]:
        return set().union(*map(expand, groups[name])) if name.startswith("@") else {name}

    allowed = expand("@default")
    for line in filters:
        named = set().union(*map(expand, line.removeprefix("~").split()))
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed
