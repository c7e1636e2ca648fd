"""The share of a process's memory that the index may take.

Besides its index, a server needs memory for the interpreter and its libraries, messages, responses that wait for the
store, and segments that are being merged. `needed` says how much (docs/benchmarks.md, "Memory besides the index").
"""

from histospec.server.arguments import shown
from histospec.server.errors import ConfigError

OVERHEAD = 512 << 20
"""Bytes that a server needs besides its index, however small the index is ..."""
OVERHEAD_SHARE = 0.15
"""... plus this share of the index, and ..."""
FREE_SHARE = 0.15
"""... at least this share of all its memory. The chart and the alert HistoSpecMemoryTight have the same rule."""
DEFAULT = 8 << 30
LEAST_SHARE = 0.25  # of a limit too small for OVERHEAD
ROUND = 1 << 20


def needed(budget: int) -> int:
    """Returns the bytes that a server with an index of `budget` bytes may need."""
    return max(budget + OVERHEAD + int(budget * OVERHEAD_SHARE), int(budget / (1 - FREE_SHARE)))


def fitting(limit: int) -> int:
    """Returns the largest index for a process limit of `limit` bytes, in whole MiB."""
    fits = max(int((limit - OVERHEAD) / (1 + OVERHEAD_SHARE)), int(limit * LEAST_SHARE))
    fits = max(min(fits, int(limit * (1 - FREE_SHARE))), ROUND)
    return fits - fits % ROUND


def default_budget(limit: int) -> int:
    """Returns the default budget in bytes."""
    return min(DEFAULT, fitting(limit))


def check_budget(budget: int, given: bool, group: int | None, machine: int) -> str:
    """Compares a budget with the process's memory, all in bytes. Returns a warning, or "" if the budget fits.

    Args:
        budget: of the index.
        given: whether the user set it.
        group: limit of the process's control group; None if it has none.
        machine: memory of the machine.

    Raises ConfigError if the index alone would fill the control group, because the kernel would kill the process.
    """
    limit = min(machine, machine if group is None else group)
    whose = "the control group (the container's memory limit)" if group == limit else "this machine"
    if needed(budget) <= limit:
        return ""
    advice = f"set --memory to {_mib(fitting(limit))} or less, or give the process {_mib(needed(budget))}"
    if given and group is not None and budget >= group:
        raise ConfigError(
            f"--memory {_mib(budget)}: the index alone would fill {whose} of {_mib(group)}, and the kernel would kill "
            f"the process; {advice}"
        )
    return (
        f"--memory {_mib(budget)}: with what it needs besides the index, the server may take "
        f"{_mib(needed(budget))}, more than {whose} of {_mib(limit)} has; {advice}"
    )


def _mib(size: int) -> str:
    return shown(size - size % ROUND)
