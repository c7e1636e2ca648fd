"""Makes steps without drafts cost what they cost without speculation.

Since 0.32, vLLM prepares the verification of drafts in every step if any speculation is configured. Models with
recurrent layers need that. For other models, a step without drafts then takes 5 % more time on a CPU: it computes the
places of no drafted tokens, and runs the rejection sampler around the sampler. Up to 0.31, vLLM prepared such a step as
an engine without speculation does. With this replacement it does so again.
"""

import functools
import importlib
import logging
from typing import Any

from histospec.client.vllm.patches.replacing import changed, is_replaced, parameters, replace

logger = logging.getLogger("histospec.vllm")

FIRST = ["self", "scheduler_output", "num_scheduled_tokens"]


def install() -> None:
    """Replaces vLLM's function, at most once per process, if it has the known form."""
    runner: Any = getattr(importlib.import_module("vllm.v1.worker.gpu_model_runner"), "GPUModelRunner", None)
    prepare = getattr(runner, "_prepare_inputs", None)
    if prepare is None or parameters(prepare)[: len(FIRST)] != FIRST:
        logger.info("HistoSpec: this vLLM has another model runner; steps without drafts cost a little more")
    elif not is_replaced(runner, "_prepare_inputs"):
        replace(runner, "_prepare_inputs", undrafted(prepare))


def undrafted(prepare: Any) -> Any:
    """Returns `_prepare_inputs` that sees no speculation in steps without drafts."""

    @functools.wraps(prepare)
    def prepared(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens or self.model_config.has_inner_state:
            return prepare(self, scheduler_output, *args, **kwargs)
        with changed(self, "speculative_config", None):
            return prepare(self, scheduler_output, *args, **kwargs)

    return prepared
