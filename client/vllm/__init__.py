"""vLLM rollouts with drafts: two names in vLLM's own configuration, and no fork.

    --speculative-config '{"method": "custom_class", "model": "histospec.client.vllm.HistoSpecProposer",
                           "num_speculative_tokens": 16}'
    --scheduler-cls histospec.client.vllm.HistoSpecScheduler

with HISTOSPEC_ENDPOINT and HISTOSPEC_NAMESPACE set. The scheduler opens a session for every request, drafts and commits
the finished responses; the proposer only makes vLLM ask for drafts. vLLM 0.22 and later.

Both replace some functions of vLLM in memory; `patches` lists them, with the reason for each.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proposer import HistoSpecProposer
    from .scheduler import HistoSpecScheduler

__all__ = ["HistoSpecProposer", "HistoSpecScheduler"]


def __getattr__(name: str) -> Any:
    """Imports them when they are asked for: vLLM looks into this package in processes that need neither."""
    if name == "HistoSpecProposer":
        from .proposer import HistoSpecProposer

        return HistoSpecProposer
    if name == "HistoSpecScheduler":
        from .scheduler import HistoSpecScheduler

        return HistoSpecScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
