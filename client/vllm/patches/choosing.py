"""Lets vLLM choose its model runner V2 with HistoSpec's drafts, and keeps its scheduling synchronous by default.

vLLM chooses V1 for a speculative method of the class `custom_class`, because its own V2 has no drafts from a scheduler.
`runner_v2.py` adds them, so vLLM may choose as without speculation: V2 on GPUs since 0.29, unless a feature needs V1 or
VLLM_USE_V2_MODEL_RUNNER is set. With V2, vLLM would also turn asynchronous scheduling on.
"""

import functools
import importlib
import typing
from typing import Any

from histospec.client.vllm import releases, settings
from histospec.client.vllm.needs import FIRST_V2
from histospec.client.vllm.patches.replacing import attach, changed, is_replaced, replace

FEATURES = "_get_v2_model_runner_unsupported_features"
REFUSED = "speculative method 'custom_class'"


def install() -> None:
    """Replaces two methods of vLLM's configuration, at most once per process. Older releases stay unchanged."""
    config: Any = importlib.import_module("vllm.config.vllm").VllmConfig
    if releases.before(releases.installed(), FIRST_V2) or not hasattr(config, FEATURES):
        return
    if is_replaced(config, FEATURES):
        return
    replace(config, FEATURES, _admitting(getattr(config, FEATURES)))
    replace(config, "__post_init__", _synchronous(config.__post_init__))


def _admitting(unsupported_features: Any) -> Any:
    """Returns the method that lists what V2 lacks, without HistoSpec's drafts in the list."""

    @functools.wraps(unsupported_features)
    def without_ours(self: Any) -> list[str]:
        found: list[str] = unsupported_features(self)
        return [feature for feature in found if not (feature == REFUSED and settings.proposes(self))]

    return without_ours


def _synchronous(post_init: Any) -> Any:
    """Returns `VllmConfig.__post_init__` for which asynchronous scheduling is off unless it is set to true.

    If it is, vLLM must not refuse it, and HistoSpecScheduler stands for its asynchronous counterpart.
    """

    @functools.wraps(post_init)
    def decided(self: Any, *args: Any, **named: Any) -> Any:
        scheduling = self.scheduler_config
        if not settings.proposes(self):
            return post_init(self, *args, **named)
        if scheduling.async_scheduling is None:
            attach(scheduling, "async_scheduling", False)
        if not scheduling.async_scheduling:
            return post_init(self, *args, **named)
        module: Any = importlib.import_module("vllm.config.vllm")
        known = typing.get_args(module.NgramGPUTypes)
        with changed(module, "NgramGPUTypes", typing.Literal[(*known, "custom_class")]):
            result = post_init(self, *args, **named)
        if scheduling.async_scheduling and settings.is_our_scheduler(scheduling.scheduler_cls):
            attach(scheduling, "scheduler_cls", settings.asynchronous(scheduling.scheduler_cls))
        return result

    return decided
