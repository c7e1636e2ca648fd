"""The client for asyncio."""

from __future__ import annotations  # so that help() names types as they are written here

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from histospec.client import arguments, quiet_grpc
from histospec.client.config import configure
from histospec.client.core.core import Core
from histospec.client.core.step import Pending
from histospec.client.signatures import same_as
from histospec.client.sync import GRACE, DraftClient
from histospec.client.transport import calls, keeping
from histospec.client.transport.on_loop import LoopConnections
from histospec.client.transport.stream import Streams
from histospec.client.values import Draft, Inspection, LengthPrediction, Response, Shard, Stats


class AsyncDraftClient:
    """A client of the draft server for asyncio. It has the methods of `DraftClient`, as coroutines.

    All calls must come from one event loop, that of the first call; from another one they raise WrongLoop. Arguments,
    environment and all other errors are those of `DraftClient`. A call may be cancelled; the client remains usable.
    """

    @same_as(DraftClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.config = configure(*args, **kwargs)
        self._waiting = _Waiting()
        self._core = Core(self.config, self._waiting.check)
        self._streams = Streams(self._core)
        self._connections = LoopConnections(self._core, self._streams, self._waiting.until)
        self._dropped = weakref.finalize(self, self._connections.dropped)
        self._dropped.atexit = False  # type: ignore[misc]  # missing in the stubs

    @same_as(DraftClient.open)
    async def open(self, *args: Any, **kwargs: Any) -> list[int]:
        """See `DraftClient.open`."""
        self._streams.join()
        return self._core.open(*args, **kwargs)

    @same_as(DraftClient.continues)
    async def continues(self, *args: Any, **kwargs: Any) -> bool:
        """See `DraftClient.continues`."""
        return self._core.continues(*args, **kwargs)

    @same_as(DraftClient.step)
    async def step(self, *args: Any, **kwargs: Any) -> list[Draft]:
        """See `DraftClient.step`."""
        return await self.receive(await self.send(*args, **kwargs))

    @same_as(DraftClient.send)
    async def send(self, *args: Any, **kwargs: Any) -> Pending:
        """See `DraftClient.send`."""
        self._streams.join()
        pending = self._core.send(*args, **kwargs)
        if pending.touched:
            self._streams.kick(pending.touched)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self._core.abandon(pending)
                raise
        return pending

    async def receive(self, pending: Pending) -> list[Draft]:
        """See `DraftClient.receive`."""
        await self.wait(pending)
        return pending.drafts()

    async def wait(self, pending: Pending) -> None:
        """See `DraftClient.wait`."""
        quiet_grpc.refuse_after_fork()
        self._streams.join()
        arguments.instance("pending", pending, Pending, "give what send returned, awaited")
        try:
            await self._waiting.until(lambda: pending.done, max(GRACE, pending.deadline - time.monotonic()))
        except asyncio.CancelledError:
            self._core.abandon(pending)
            raise
        self._core.end_wait(pending)

    @same_as(DraftClient.finish)
    async def finish(self, *args: Any, **kwargs: Any) -> None:
        """See `DraftClient.finish`."""
        self._streams.join()
        self._core.finish(*args, **kwargs)

    async def flush(self, timeout: float | None = None) -> None:
        """See `DraftClient.flush`."""
        self._streams.join()
        await self._connections.flush(self._core.flush_seconds(timeout))

    @same_as(DraftClient.keep)
    async def keep(self, *args: Any, **kwargs: Any) -> list[bool]:
        """See `DraftClient.keep`."""
        return await self._connections.keep(keeping.batch(self.config, *args, **kwargs))

    @same_as(DraftClient.ingest)
    async def ingest(self, *args: Any, **kwargs: Any) -> None:
        """See `DraftClient.ingest`."""
        await self._connections.do(calls.ingest, *args, **kwargs)

    @same_as(DraftClient.history)
    async def history(self, *args: Any, **kwargs: Any) -> list[Response]:
        """See `DraftClient.history`."""
        await self.flush(self.config.timeouts.shutdown)
        return (await self._connections.do(calls.history, *args, **kwargs))[0]

    @same_as(DraftClient.histories)
    async def histories(self, *args: Any, **kwargs: Any) -> list[list[Response] | None]:
        """See `DraftClient.histories`."""
        await self.flush(self.config.timeouts.shutdown)
        await self._connections.find()
        plan = calls.histories(self._core, *args, **kwargs)
        return [None if answer is None else answer[0] for answer in await self._connections.many(plan)]

    @same_as(DraftClient.ingest_many)
    async def ingest_many(self, *args: Any, **kwargs: Any) -> list[bool]:
        """See `DraftClient.ingest_many`."""
        await self._connections.find()
        plan = calls.ingest_many(self._core, *args, **kwargs)
        return [answer is not None for answer in await self._connections.many(plan)]

    @same_as(DraftClient.predict_length)
    async def predict_length(self, *args: Any, **kwargs: Any) -> LengthPrediction:
        """See `DraftClient.predict_length`."""
        return (await self._connections.do(calls.predict_length, *args, **kwargs))[0]

    @same_as(DraftClient.predict_lengths)
    async def predict_lengths(self, *args: Any, **kwargs: Any) -> list[LengthPrediction | None]:
        """See `DraftClient.predict_lengths`."""
        await self._connections.find()
        asked = calls.predict_lengths(self._core, *args, **kwargs)
        return asked.in_order(await self._connections.many(asked.calls))

    async def topology(self) -> list[Shard]:
        """See `DraftClient.topology`."""
        await self._connections.find()
        return calls.members(self._core) or (await self._connections.do(calls.topology))[0]

    async def inspect(self, timeout: float | None = None) -> list[Inspection]:
        """See `DraftClient.inspect`."""
        return await self._connections.do(calls.inspect, timeout)

    async def greet(self, timeout: float) -> list[Inspection]:
        """See `DraftClient.greet`."""
        return await self._connections.greet(timeout)

    async def drop_namespace(self) -> int:
        """See `DraftClient.drop_namespace`."""
        return sum(await self._connections.do(calls.drop_namespace))

    async def rewind(self, epoch: int) -> int:
        """See `DraftClient.rewind`."""
        return sum(await self._connections.do(calls.rewind, epoch))

    def stats(self) -> Stats:
        """See `DraftClient.stats`."""
        return self._core.stats()

    async def shutdown(self) -> None:
        """See `DraftClient.shutdown`."""
        if quiet_grpc.forked():
            return
        self._connections.leave_closed_loop()
        self._streams.join()
        await self._connections.send_last()
        await self._connections.end()
        self._dropped.detach()

    async def close(self, *args: Any, **kwargs: Any) -> None:
        """See `DraftClient.close`."""
        await (self.finish(*args, **kwargs) if args or kwargs else self.shutdown())

    async def aclose(self) -> None:
        """Calls `shutdown`, for `contextlib.aclosing`."""
        await self.shutdown()

    def __repr__(self) -> str:
        return f"<AsyncDraftClient {self._core.summary()}>"

    async def __aenter__(self) -> AsyncDraftClient:
        quiet_grpc.refuse_after_fork()
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncDraftClient holds connections and cannot be copied or pickled; make a new one instead")

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


class _Waiting:
    """The waiting calls. It does not refer to the client, so that streams do not keep the client alive."""

    def __init__(self) -> None:
        self._calls: set[tuple[Callable[[], bool], asyncio.Future[None]]] = set()

    async def until(self, done: Callable[[], bool], timeout: float) -> None:
        if done() or timeout <= 0:
            return
        call = (done, asyncio.get_running_loop().create_future())
        self._calls.add(call)
        try:
            await asyncio.wait([call[1]], timeout=timeout)
        finally:
            self._calls.discard(call)

    def check(self) -> None:
        for done, future in self._calls:
            if done() and not future.done():
                future.set_result(None)
