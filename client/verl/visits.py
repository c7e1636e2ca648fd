"""Which old response a rollout starts from. A visit: the rollouts of one problem that run at the same time here."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from .. import HistoSpecError, Response
from ..rollouts.old import choose
from . import history

MANY = 256
"""Old responses of a problem that are looked at, and so the siblings that can have one each."""

_validating = contextvars.ContextVar("validating", default=False)


@dataclass
class _Visit:
    old: asyncio.Task[list[Response]]
    rollouts: int = 0


_visits: dict[str, _Visit] = {}


def validating() -> bool:
    """Whether the rollout of this task measures the policy, and so may not reuse what another one wrote."""
    return _validating.get()


def begin(validate: bool) -> None:
    """Says so, for the task that calls and what it starts."""
    _validating.set(validate)


@contextlib.asynccontextmanager
async def one_old(problem: str, prompt: Sequence[int]) -> AsyncIterator[Response | None]:
    """An old response of a problem, newest epoch first; None where there is none left.

    The siblings of a visit get one each, all from what was there when the visit began: what the first of them writes
    would otherwise be old for the next. Inside of the block the visit goes on.
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
        history.report("finds no old responses", error)
        return []
