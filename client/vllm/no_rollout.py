"""What a request of vLLM does that is no rollout."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from histospec.client.engines import options

if TYPE_CHECKING:
    from histospec.client.vllm.interface import SamplingParams


def why_no_rollout(parameters: "SamplingParams", given: options.RequestOptions) -> str:
    """Returns what a request without a session does, for the log; empty for a rollout."""
    transfer = (parameters.extra_args or {}).get("kv_transfer_params")
    return options.why_no_rollout(
        given,
        prefills=isinstance(transfer, Mapping) and bool(transfer.get("do_remote_decode")),
        scores_prompt=parameters.prompt_logprobs is not None,
        one_token=parameters.max_tokens == 1,
    )
