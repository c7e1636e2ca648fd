"""A value that costs something to compute, for any number of callers that ask at any time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SECONDS = 1.0  # from the beginning of a computation to that of the next


class OnceASecond(Generic[T]):
    """Computes at most once a second.

    The callers of one second share a computation that begins after they asked, so each sees what it did before. A
    caller waits up to a second for that.
    """

    def __init__(self, compute: Callable[[], Awaitable[T]], seconds: float = SECONDS) -> None:
        self._compute = compute
        self._seconds = seconds
        self._began = float("-inf")  # the last computation, by the loop's clock
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # has not begun to compute

    async def __call__(self) -> T:
        """Raises what the computation raises."""
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
    """Takes an error that no caller is left to take."""
    if not task.cancelled():
        task.exception()
