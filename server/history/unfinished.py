"""Finishes work although its caller leaves: a cancelled caller must not leave the index without what the store has."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Unfinished:
    """Work that has begun and not ended. Lives on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what the work does. If the caller is cancelled, the work goes on."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have left: asyncio would log an exception that is never retrieved

    async def wait(self) -> None:
        """Waits for what has begun."""
        if self._tasks:
            await asyncio.wait(self._tasks)
