"""Sends finished rollouts to the history in the background. Rollouts neither wait for it nor fail because of it."""

import asyncio
import functools
import logging
import math
import time
from typing import Any

from histospec.client import AsyncDraftClient, HistoSpecError, Response, arguments

logger = logging.getLogger("histospec.verl")

QUIET_SECONDS = 60.0  # between two reports of one kind of failure

_going: set[asyncio.Task[None]] = set()
_reported: dict[str, float] = {}


@functools.cache
def client() -> AsyncDraftClient:
    """Returns the client of this process. All agent loops of a process share one event loop.

    Raises:
        ConfigurationError: HISTOSPEC_ENDPOINT or another setting is missing or malformed.
    """
    return AsyncDraftClient()


def keep(output: Any, problem: str, seed: int | None) -> None:
    """Starts to add a finished rollout to the history of its problem.

    Args:
        output: verl's `AgentLoopOutput`. Its `max_global_steps`, if set, is the version of the policy.
        problem: the problem id that its requests to vLLM have, too.
        seed: their seed; None if unknown.
    """
    if not output.response_ids:  # aborted before the first token
        return
    response = Response(
        output.response_ids,
        logprobs=output.response_logprobs or None,
        reward=arguments.known_reward("reward_score", output.reward_score),
        generated=[bool(wrote) for wrote in output.response_mask],
        seed=seed,
    )
    task = asyncio.get_running_loop().create_task(
        _ingest(output.prompt_ids, response, output.extra_fields.get("max_global_steps"), problem)
    )
    _going.add(task)  # the loop itself holds tasks only weakly
    task.add_done_callback(_going.discard)


def report(what: str, error: Exception | str) -> None:
    """Logs a failure, at most once per minute for each kind."""
    now = time.monotonic()
    if now - _reported.get(what, -math.inf) >= QUIET_SECONDS:
        _reported[what] = now
        logger.warning("HistoSpec %s: %s", what, error)


async def _ingest(prompt: list[int], response: Response, epoch: int | None, problem: str) -> None:
    try:
        await client().ingest(prompt, [response], epoch, problem)
    except (HistoSpecError, ValueError) as error:
        report("loses rollouts", error)
