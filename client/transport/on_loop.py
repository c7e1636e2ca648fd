"""The connections of the asyncio client, on the loop of its callers."""

import _thread
import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from histospec.client import quiet_grpc
from histospec.client.core.core import Core
from histospec.client.transport import at_exit
from histospec.client.transport.connections import Connections
from histospec.client.transport.stream import Streams
from histospec.client.transport.threads import AT_A_TIME

S = TypeVar("S")
T = TypeVar("T")

_ending: "set[asyncio.Task[None]]" = set()
"""Tasks that end clients; a loop keeps only weak references to its tasks."""


class LoopConnections(Connections):
    """The connections of an asyncio client. `until` waits for a condition, at most a number of seconds."""

    def __init__(
        self, core: Core, streams: Streams, until: Callable[[Callable[[], bool], float], Awaitable[None]]
    ) -> None:
        super().__init__(core, streams, grpc.aio)
        self._until = until

    async def find(self, timeout: float | None = None) -> None:
        """See Connections. Raises WrongLoop."""
        quiet_grpc.refuse_after_fork()
        self._streams.join()
        await super().find(timeout)

    async def _answer(self, method: Callable[..., Any], request: Any, **options: Any) -> Any:
        return await method(request, **options)

    async def _each(self, function: Callable[[S], Awaitable[T]], inputs: Sequence[S]) -> list[T]:
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(element: S) -> T:
            async with gate:
                return await function(element)

        running = [asyncio.ensure_future(one(element)) for element in inputs]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def _turn(self, first: Callable[[], None], done: Callable[[], bool], until: float) -> None:
        first()
        await asyncio.sleep(0)
        await self._until(done, until - time.monotonic())

    async def end(self) -> None:
        """Closes the connections, also if the caller is cancelled meanwhile."""
        self._core.stop()
        await asyncio.shield(self._task(self._close))

    async def _close(self) -> None:
        await self._streams.end_all()
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()
        at_exit.leave(self)

    def leave_closed_loop(self) -> None:
        """Gives up the loop if it is closed, and with it all connections; another loop may send what waits."""
        loop = self._streams.loop
        if loop is not None and loop.is_closed():
            self._streams.give_up_loop()
            self._channels.clear()

    def dropped(self) -> None:
        """Sends finished responses and closes the connections after the client was collected, on its loop."""
        loop = self._streams.loop
        if quiet_grpc.forked() or (loop is None and not self._core.unacknowledged):
            at_exit.leave(self)
            return
        try:
            if loop is None:
                raise RuntimeError
            loop.call_soon_threadsafe(self._task, self._send_and_end)
        except RuntimeError:  # the loop is closed
            self._dropped_later()

    def _dropped_later(self) -> None:
        """Ends the connections without their loop: in a thread with another one, if responses wait."""
        if not self._core.unacknowledged:
            self._streams.abandon()
            at_exit.leave(self)
            return
        with contextlib.suppress(RuntimeError):  # the interpreter shuts down, and `at_exit` sends them
            _thread.start_new_thread(self.at_exit, ())

    async def _send_and_end(self) -> None:
        await self.send_last()
        await self.end()

    def _task(self, end: Callable[[], Any]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(end())
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        return task

    def at_exit(self) -> None:
        """Sends finished responses when the process ends, on the client's loop, or on another if that is closed."""
        if not self._core.unacknowledged:
            self._report()
            return
        self.leave_closed_loop()
        loop = self._streams.loop
        if loop is None:
            asyncio.run(self._send_and_end())
        elif loop.is_running():  # in another thread
            sent = asyncio.run_coroutine_threadsafe(self.send_last(), loop)
            concurrent.futures.wait([sent], self._core.config.timeouts.shutdown)
            self._report()
        else:
            loop.run_until_complete(self.send_last())
