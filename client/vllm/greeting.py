"""The adapter's checks and log lines when an engine starts: which vLLM it is, then what any engine says."""

import logging
from typing import TYPE_CHECKING

from histospec.client.engines import greeting
from histospec.client.vllm import releases

if TYPE_CHECKING:
    from histospec.client import DraftClient

logger = logging.getLogger("histospec.vllm")


def greet(client: "DraftClient", max_tokens: int, runner: str) -> None:
    """Logs what is not known of the release of vLLM in this process, then greets the shards.

    Args:
        client: a client that has not called the server yet.
        max_tokens: the longest draft that the engine verifies, in tokens.
        runner: vLLM's model runner, "V1" or "V2".

    Raises:
        ValueError: max_tokens exceeds the limit of a shard, or a file of the client's settings cannot be read.
    """
    version = releases.installed()
    if version and (doubt := releases.doubt(version, runner)):
        logger.log(logging.WARNING if releases.unknown(version) else logging.INFO, "HistoSpec: %s", doubt)
    greeting.greet(client, max_tokens, "num_speculative_tokens", f", model runner {runner}")
