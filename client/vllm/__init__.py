"""The vLLM adapter: rollouts with drafts, with two settings of vLLM's own.

    --speculative-config '{"method": "custom_class", "model": "histospec.client.vllm.HistoSpecProposer",
                           "num_speculative_tokens": 16}'
    --scheduler-cls histospec.client.vllm.HistoSpecScheduler

Set HISTOSPEC_ENDPOINT and HISTOSPEC_NAMESPACE, too. The scheduler opens a session for every request, gets drafts from
the server, and commits the finished responses. The proposer drafts nothing; vLLM needs one to verify drafts.

`releases.TESTED` are the releases of vLLM that the adapter is tested with; docs/vllm-versions.md says what is known of
others.

The adapter replaces some functions of vLLM in memory, without changing its files. `patches` lists them, each with its
reason.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from histospec.client.vllm.proposer import HistoSpecProposer
    from histospec.client.vllm.scheduler import HistoSpecScheduler

__all__ = ["HistoSpecProposer", "HistoSpecScheduler"]


def __getattr__(name: str) -> Any:
    """Imports a class at its first use, because vLLM imports this package in processes that need neither."""
    if name == "HistoSpecProposer":
        from histospec.client.vllm.proposer import HistoSpecProposer

        return HistoSpecProposer
    if name == "HistoSpecScheduler":
        from histospec.client.vllm.scheduler import HistoSpecScheduler

        return HistoSpecScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
