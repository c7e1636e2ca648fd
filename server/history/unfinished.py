"""Finishes work even if its caller leaves: otherwise the index could lack responses that the store has."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Unfinished:
    """Work in progress. Used only on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work and returns its result. If the caller is cancelled, the work goes on."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: the caller may have left, and asyncio would log it

    async def wait(self) -> None:
        """Waits until all work has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)
