"""The addition to verl's managers of both kinds: metrics of drafts for the trainer's logger."""

import logging
from typing import Any

from histospec.client import ConfigurationError, DraftClient
from histospec.client.rollouts import RolloutMetrics
from histospec.client.verl.tracking import log_with_steps

logger = logging.getLogger("histospec.verl")

PREFIX = "rollout/histospec/"


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
