"""Lets the model's own drafter rest: in a step that says REST, it makes no forward pass.

`SchedulerOutput.num_spec_tokens_to_schedule` says how many tokens the drafter drafts. If it is 0, vLLM still makes the
drafter's first pass over the step's tokens, so that later drafts find their keys and values. With a small draft model
on a CPU this takes 60 % of a step without drafts. HistoSpec's scheduler sets it to REST if it needs no such drafts.
"""

import functools
import importlib
import logging
from typing import Any

from histospec.client.vllm.choice.modes import REST
from histospec.client.vllm.patches.replacing import is_replaced, parameters, replace

logger = logging.getLogger("histospec.vllm")

FIRST = ["self", "scheduler_output", "sampled_token_ids"]


def can_be_told() -> bool:
    """Returns whether the drafter drafts as many tokens as a step says, and can rest.

    This is the case in vLLM 0.24 and later. All processes get the same result.
    """
    propose = getattr(_runner(), "propose_draft_token_ids", None)
    output: Any = importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput
    known = propose is not None and parameters(propose)[: len(FIRST)] == FIRST
    return known and "num_spec_tokens_to_schedule" in output.__dataclass_fields__


def install() -> None:
    """Replaces vLLM's function, at most once, if this vLLM has the known form."""
    runner = _runner()
    if not can_be_told():
        logger.info("HistoSpec: this vLLM cannot tell the model's own drafter to rest; it drafts in every step")
    elif not is_replaced(runner, "propose_draft_token_ids"):
        replace(runner, "propose_draft_token_ids", resting(runner.propose_draft_token_ids))


def resting(propose: Any) -> Any:
    """Returns `propose_draft_token_ids` with no drafts, and no pass, in steps that say REST."""

    @functools.wraps(propose)
    def drafted(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.num_spec_tokens_to_schedule != REST:
            return propose(self, scheduler_output, *args, **kwargs)
        return [[] for _ in self.input_batch.req_ids]

    return drafted


def _runner() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
