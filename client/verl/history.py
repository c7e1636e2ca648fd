"""Sends finished rollouts to the history in the background. Rollouts neither wait for it nor fail because of it."""

import asyncio
import functools
import logging
import math
import time
from typing import Any

from histospec.client import AsyncDraftClient, HistoSpecError, Response, Timeouts

logger = logging.getLogger("histospec.verl")

QUIET_SECONDS = 60.0  # between two reports of one kind of failure

PATIENCE = 60.0
"""Seconds for a store that is slow or away: no rollout waits for it."""

_going: set[asyncio.Task[None]] = set()
_reported: dict[str, float] = {}


@functools.cache
def client() -> AsyncDraftClient:
    """Returns the client of this process. All agent loops of a process share one event loop.

    Raises:
        ConfigurationError: HISTOSPEC_ENDPOINT or another setting is missing or malformed.
    """
    return AsyncDraftClient(timeouts=Timeouts(keep=PATIENCE))


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
        logprobs=output.response_logprobs,
        reward=output.reward_score,
        generated=[bool(wrote) for wrote in output.response_mask],
        seed=seed,
    )
    task = asyncio.get_running_loop().create_task(
        _keep(output.prompt_ids, response, output.extra_fields.get("max_global_steps"), problem)
    )
    _going.add(task)  # the loop itself holds tasks only weakly
    task.add_done_callback(_going.discard)


def report(what: str, error: Exception) -> None:
    """Logs a failure, at most once per minute for each kind."""
    now = time.monotonic()
    if now - _reported.get(what, -math.inf) >= QUIET_SECONDS:
        _reported[what] = now
        logger.warning("HistoSpec %s: %s", what, error)


async def _keep(prompt: list[int], response: Response, epoch: int | None, problem: str) -> None:
    try:
        await client().keep([prompt], [response], epoch=epoch, problems=[problem])
    except (HistoSpecError, ValueError) as error:
        report("loses rollouts", error)
