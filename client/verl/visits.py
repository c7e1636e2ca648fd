"""Gives each rollout an old response to start from. A visit is the set of rollouts of one problem that run here now."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from histospec.client import HistoSpecError, Response
from histospec.client.rollouts.old import choose
from histospec.client.verl import history

MANY = 256
"""How many old responses of a problem are fetched: at most so many siblings get one each."""

_validating = contextvars.ContextVar("validating", default=False)


@dataclass
class _Visit:
    old: asyncio.Task[list[Response]]
    rollouts: int = 0


_visits: dict[str, _Visit] = {}


def validating() -> bool:
    """Returns whether this task's rollout is for validation, and so must not reuse old responses."""
    return _validating.get()


def begin(validate: bool) -> None:
    """Sets `validating` for the calling task and the tasks that it starts."""
    _validating.set(validate)


@contextlib.asynccontextmanager
async def one_old(problem: str, prompt: Sequence[int]) -> AsyncIterator[Response | None]:
    """Yields an old response of a problem, newest epoch first; None if there is none left. The visit lasts as the
    block.

    All siblings of a visit get responses from the history at its begin. Otherwise the response of the first sibling
    would be an old one for the next.
    """
    visit = _visits.get(problem)
    if visit is None:
        visit = _visits[problem] = _Visit(asyncio.create_task(_fetch(problem, prompt)))
    visit.rollouts += 1
    try:
        old = await asyncio.shield(visit.old)
        yield old.pop(0) if old else None
    finally:
        visit.rollouts -= 1
        if not visit.rollouts:
            del _visits[problem]


async def _fetch(problem: str, prompt: Sequence[int]) -> list[Response]:
    try:
        return choose(await history.client().history(prompt, problem, MANY), MANY, None)
    except HistoSpecError as error:
        history.report("cannot fetch old responses", error)
        return []
