"""The drafter of vLLM's workers. It drafts nothing, because the scheduler does."""

from typing import Any

from histospec.client.vllm import logs, settings


class HistoSpecProposer:
    """Makes vLLM verify drafts, which HistoSpecScheduler sets.

    vLLM creates one in every worker; the scheduler gets the drafts once per engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings.check_scheduler(vllm_config)
        logs.join_vllm()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing; vLLM's CPU runner calls it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Returns one empty draft per request."""
        return [[] for _ in sampled_token_ids]
