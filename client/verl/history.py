"""Finished rollouts on their way to the history; a rollout never waits for that, and never fails because of it."""

import asyncio
import functools
import logging
import math
import time
from typing import Any

from .. import AsyncDraftClient, HistoSpecError, Response

logger = logging.getLogger("histospec.verl")

QUIET_SECONDS = 60.0  # between two reports of failures

_going: set[asyncio.Task[None]] = set()
_reported: dict[str, float] = {}


@functools.cache
def client() -> AsyncDraftClient:
    """The client of this process, whose one event loop all agent loops share.

    Raises:
        ConfigurationError: HISTOSPEC_ENDPOINT or another setting is missing or malformed.
    """
    return AsyncDraftClient()


def keep(output: Any, problem: str) -> None:
    """Begins to add a finished rollout to the history of its problem.

    Args:
        output: verl's `AgentLoopOutput`; the policy's version is its `max_global_steps`, where vLLM was told of one.
        problem: the id that its requests to vLLM had, too.
    """
    if not output.response_ids:  # aborted before the first token
        return
    response = Response(
        output.response_ids,
        logprobs=output.response_logprobs or None,
        reward=output.reward_score,
        generated=[bool(wrote) for wrote in output.response_mask],
    )
    task = asyncio.get_running_loop().create_task(
        _ingest(output.prompt_ids, response, output.extra_fields.get("max_global_steps"), problem)
    )
    _going.add(task)  # the loop itself holds tasks only weakly
    task.add_done_callback(_going.discard)


def report(what: str, error: Exception) -> None:
    """Says that something of ours failed; not every time."""
    now = time.monotonic()
    if now - _reported.get(what, -math.inf) >= QUIET_SECONDS:
        _reported[what] = now
        logger.warning("HistoSpec %s: %s", what, error)


async def _ingest(prompt: list[int], response: Response, epoch: int | None, problem: str) -> None:
    try:
        await client().ingest(prompt, [response], epoch, problem)
    except (HistoSpecError, ValueError) as error:
        report("loses rollouts", error)
