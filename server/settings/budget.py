"""How much memory the index may take of what the process may hold.

A server needs memory beside its index: the interpreter and its libraries, messages, responses that wait for the store,
segments that are being merged. `needed` says how much, as measured (docs/benchmarks.md, "Memory beside the index").
"""

from histospec.server.arguments import shown
from histospec.server.errors import ConfigError

BESIDE = 512 << 20
"""Bytes that a server needs beside its index, however small that is ..."""
BESIDE_SHARE = 0.15
"""... and what comes on top, as a share of the index."""
DEFAULT = 8 << 30
LEAST_SHARE = 0.25  # of a limit so small that what is needed beside would leave nothing
ROUND = 1 << 20


def needed(budget: int) -> int:
    """Bytes that a server may need whose index holds so many."""
    return budget + BESIDE + int(budget * BESIDE_SHARE)


def fitting(limit: int) -> int:
    """The largest index for a process that may hold `limit` bytes, in whole MiB."""
    fits = max(int((limit - BESIDE) / (1 + BESIDE_SHARE)), int(limit * LEAST_SHARE), ROUND)
    return fits - fits % ROUND


def default_budget(limit: int) -> int:
    """The budget where nobody gives one, in bytes."""
    return min(DEFAULT, fitting(limit))


def check_budget(budget: int, given: bool, group: int | None, machine: int) -> str:
    """Compares a budget with what the process may hold, all in bytes. -> what is wrong with it, or "".

    Args:
        budget: of the index.
        given: whether a person chose it.
        group: the limit of the process's control group, if it has one.
        machine: the memory of the machine.

    Raises ConfigError where the index alone would fill the control group: the kernel would end the process.
    """
    limit = min(machine, machine if group is None else group)
    whose = "the control group (the container's memory limit)" if group == limit else "this machine"
    if needed(budget) <= limit:
        return ""
    advice = f"give --memory {_mib(fitting(limit))} or less, or the process {_mib(needed(budget))}"
    if given and group is not None and budget >= group:
        raise ConfigError(
            f"--memory {_mib(budget)}: the index alone would fill {whose} of {_mib(group)}, and the kernel would end "
            f"the process; {advice}"
        )
    return (
        f"--memory {_mib(budget)} and what the server needs beside the index are {_mib(needed(budget))}, more than "
        f"{whose} of {_mib(limit)} holds; {advice}"
    )


def _mib(size: int) -> str:
    return shown(size - size % ROUND)
