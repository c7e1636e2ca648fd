"""Steps in which the model's own drafter rests: it makes no pass at all.

`SchedulerOutput.num_spec_tokens_to_schedule` says how many tokens it makes. Where that is 0, vLLM still makes the
drafter's first pass over the step's tokens, so that later drafts find their keys and values: with a small draft model
on a CPU 60 % of a plain step. HistoSpec's scheduler says REST, where it wants no such drafts.
"""

import functools
import importlib
import logging
from typing import Any

from ..model_drafter.amount import REST
from .replacing import is_replaced, parameters, replace

logger = logging.getLogger("histospec.vllm")

FIRST = ["self", "scheduler_output", "sampled_token_ids"]


def can_be_told() -> bool:
    """Whether this vLLM's workers make as many tokens as a step says, and can rest; in all of its processes the same.

    vLLM 0.24 and later.
    """
    propose = getattr(_runner(), "propose_draft_token_ids", None)
    output: Any = importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput
    known = propose is not None and parameters(propose)[: len(FIRST)] == FIRST
    return known and "num_spec_tokens_to_schedule" in output.__dataclass_fields__


def install() -> None:
    """Lets the drafters of this process rest, once; leaves a vLLM alone that is not known."""
    runner = _runner()
    if not can_be_told():
        logger.info("HistoSpec: this vLLM cannot tell the model's own drafter to rest; it drafts in every step")
    elif not is_replaced(runner, "propose_draft_token_ids"):
        replace(runner, "propose_draft_token_ids", resting(runner.propose_draft_token_ids))


def resting(propose: Any) -> Any:
    """`propose_draft_token_ids`, but for steps that say REST: they get no drafts."""

    @functools.wraps(propose)
    def drafted(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_spec_tokens_to_schedule != REST:
            return propose(self, scheduler_output, *args, **kwargs)
        return [[] for _ in self.input_batch.req_ids]

    return drafted


def _runner() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
