"""The addition to verl's managers of both kinds: metrics of drafts for the trainer's logger.

verl's trainers take no metrics from a manager of agent loops. But all of them log through `Tracking.log`, in the
process that made the manager. So this module replaces that method there, in memory. It is HistoSpec's only change of
verl.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from histospec.client import ConfigurationError, DraftClient
from histospec.client.rollouts import RolloutMetrics
from histospec.client.verl.interface import Tracking

logger = logging.getLogger("histospec.verl")

PREFIX = "rollout/histospec/"

STEP = "training/global_step"
"""A metric that verl logs with every training step, and with nothing else."""

_sources: list[Callable[[], Mapping[str, float]]] = []


class Measuring:
    """A mixin for verl's manager classes; list it before them. Their generate_sequences calls `_begins` first.

    It counts the rollouts of training. What the namespace does between the first batch of a validation and the next
    batch of training does not count. An asynchronous trainer generates for training meanwhile, which is left out, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._validating = False
        self._metrics = _metrics()
        log_with_steps(dict if self._metrics is None else self._metrics.collect)

    def _begins(self, validation: bool) -> None:
        """Notes that rollouts of training or of a validation begin."""
        if self._metrics is not None and validation != self._validating:
            (self._metrics.pause if validation else self._metrics.resume)()
        self._validating = validation


def _metrics() -> RolloutMetrics | None:
    """Returns metrics from the server that the environment names; None, with a warning, if it names none."""
    try:
        return RolloutMetrics(DraftClient(), PREFIX)
    except ConfigurationError as error:
        logger.warning("HistoSpec: verl logs no metrics of drafts, because its trainer has no server to ask: %s", error)
        return None


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
