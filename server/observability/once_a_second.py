"""Shares the result of an expensive computation among all callers of one second."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SECONDS = 1.0  # from the start of one computation to the start of the next


class OnceASecond(Generic[T]):
    """Computes a value at most once a second.

    The callers of one second share a computation that starts after they asked, so each caller sees the effects of its
    earlier calls. A caller waits up to a second for the start.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]], seconds: float = SECONDS) -> None:
        self._compute = compute
        self._seconds = seconds
        self._began = float("-inf")  # start of the last computation, by the loop's clock
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # not started to compute

    async def __call__(self) -> T:
        """Returns the value. Raises what the computation raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._in_turn())
            self._next.add_done_callback(_taken)
        return await asyncio.shield(self._next)

    async def _in_turn(self) -> T:
        clock = asyncio.get_running_loop().time
        async with self._turn:
            await asyncio.sleep(self._began + self._seconds - clock())
            self._next = None
            self._began = clock()
            return await self._compute()


def _taken(task: "asyncio.Task[T]") -> None:
    """Retrieves an error that no caller waits for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
