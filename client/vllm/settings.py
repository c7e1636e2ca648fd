"""Which of vLLM's settings cannot work with drafts from a server, and what vLLM leaves out without a word."""

import importlib
import logging
from importlib import metadata
from typing import Any

from histospec.protocol.limits import DEFAULT_MAX_DRAFT

logger = logging.getLogger("histospec.vllm")

PROCESSORS = "vllm.logits_processors"
"""Entry points of plug-ins, which vLLM loads where nothing is speculated."""


def check_drafts(max_tokens: int) -> None:
    """Refuses drafts that are longer than vLLM verifies or the client asks for.

    Raises:
        ValueError: num_speculative_tokens is too large.
    """
    sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")
    verified: int = getattr(sampler, "MAX_SPEC_LEN", DEFAULT_MAX_DRAFT)  # a longer draft ends the engine
    limit = min(DEFAULT_MAX_DRAFT, verified)
    if max_tokens > limit:
        who = "vLLM verifies no more" if limit == verified else "HistoSpec drafts no more"
        raise ValueError(f"HistoSpec: num_speculative_tokens is {max_tokens}; must be at most {limit}: {who}")


def warn_of_processors() -> None:
    """Names the logits processors that vLLM leaves out without a word; those that it is given by name it refuses."""
    if names := sorted(point.name for point in metadata.entry_points(group=PROCESSORS)):
        logger.warning(
            "HistoSpec: with speculation of any kind vLLM does not load logits processors of plug-ins, here %s",
            ", ".join(names),
        )


def check_parallelism(config: Any) -> None:
    """Refuses a model that is split over workers so that drafts are ruled out; docs/parallelism.md says how it may be.

    Raises:
        ValueError: vLLM's `parallel_config` asks for one; the sentence names the setting.
    """
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            "HistoSpec: pipeline_parallel_size is more than 1, where vLLM has no speculation of any kind "
            "(vllm-project/vllm issue 30436); leave out speculative_config and scheduler_cls"
        )
    if config.distributed_executor_backend == "external_launcher" and config.world_size > 1:
        raise ValueError(
            "HistoSpec: distributed_executor_backend is 'external_launcher', where every rank schedules for itself; "
            "drafts from a server would take the ranks of a model apart. Use 'mp' or 'ray'"
        )


def computes_here(config: Any) -> bool:
    """Whether the model's forward passes run in the scheduler's process, on its CPU. `config`: `parallel_config`."""
    here: bool = config.distributed_executor_backend == "uni"
    return here and bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
