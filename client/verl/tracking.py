"""Adds metrics to what verl logs with a training step.

verl's trainers take no metrics from a manager of agent loops. But all of them log through `Tracking.log`, in the
process that made the manager. So this module replaces that method there, in memory. It is HistoSpec's only change of
verl.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from histospec.client.verl.interface import Tracking

STEP = "training/global_step"
"""A metric that verl logs with every training step, and with nothing else."""

_sources: list[Callable[[], Mapping[str, float]]] = []


def log_with_steps(collect: Callable[[], Mapping[str, float]]) -> None:
    """Logs what `collect` returns with each training step from now on, in place of what an earlier call named."""
    if not _sources:
        Tracking.log = _with_ours(Tracking.log)
    _sources[:] = [collect]


def _with_ours(log: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(log)
    def logged(self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        ours = _sources[0]() if STEP in data else {}
        log(self, {**data, **ours}, step, *args, **kwargs)

    return logged
