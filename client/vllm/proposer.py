"""The drafter that vLLM's workers see: it drafts nothing, the scheduler does."""

from typing import Any

from . import logs


class HistoSpecProposer:
    """Makes vLLM verify drafts; HistoSpecScheduler sets them, once an engine instead of once a worker.

    vLLM makes one in every worker.
    """

    def __init__(self, vllm_config: Any) -> None:
        if vllm_config.scheduler_config.scheduler_cls is None:
            raise ValueError(
                "HistoSpecProposer drafts nothing by itself: "
                "add --scheduler-cls histospec.client.vllm.HistoSpecScheduler"
            )
        logs.join_vllm()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; the CPU runner calls it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """One empty draft a request."""
        return [[] for _ in sampled_token_ids]
