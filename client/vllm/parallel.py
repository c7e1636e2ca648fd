"""How a model may not be split over workers, where the scheduler drafts; docs/parallelism.md says how it may."""

from typing import Any


def check(config: Any) -> None:
    """Raises ValueError, naming the setting, where vLLM's `parallel_config` asks for one of these."""
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
