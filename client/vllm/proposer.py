"""The drafter that vLLM's workers see: it drafts nothing, the scheduler does."""

from typing import Any

from . import logs, settings
from .config import AdapterConfig
from .patches import cpu, undrafted


class HistoSpecProposer:
    """Makes vLLM verify drafts; HistoSpecScheduler sets them, once an engine instead of once a worker.

    vLLM makes one in every worker of the last pipeline stage, where it also installs two of the patches.
    """

    def __init__(self, vllm_config: Any) -> None:
        if vllm_config.scheduler_config.scheduler_cls is None:
            raise ValueError(
                "HistoSpecProposer drafts nothing by itself: "
                "add --scheduler-cls histospec.client.vllm.HistoSpecScheduler"
            )
        logs.join_vllm()
        settings.check_parallelism(vllm_config.parallel_config)  # before vLLM fails in words of its own
        if AdapterConfig.from_environment().cpu_fix:
            cpu.install()
        undrafted.install()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; the CPU runner calls it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """One empty draft a request."""
        return [[] for _ in sampled_token_ids]
