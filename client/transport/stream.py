"""Carries the messages of a shard over gRPC: the only place where the Draft stream does I/O.

Lives on one asyncio loop, which may stand still between two steps (see `pump.py`). gRPC's own threads go on sending and
receiving meanwhile, and the loop takes their results when it turns again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc

from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.shard import CLOSED_HERE, Shard
from histospec.client.core.step import GarbledReply
from histospec.client.core.stream_state import StreamState
from histospec.client.errors import ConfigurationError, Unavailable, WrongLoop
from histospec.client.transport.channel import metadata, open_channel
from histospec.client.transport.diagnosis import explain
from histospec.client.transport.discovery import Discovery
from histospec.v1 import draft_pb2 as pb
from histospec.v1 import draft_pb2_grpc as rpc

log = logging.getLogger("histospec.client")

_DRAFT = "/histospec.v1.DraftService/Draft"
LONGEST_ANSWER = 64 << 20
"""Bytes that gRPC takes of one answer: three times that of 4,096 sessions. Most answers have a smaller limit."""
_TOO_LONG = "CLIENT: Received message larger"
"""How gRPC's own details begin if this side has refused a response; "SERVER: " if the server has refused a message."""


def _task(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Returns a task that logs nothing if its loop is closed before it ends, as at the end of most programs."""
    task = asyncio.create_task(work)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # as asyncio.gather does
    return task


class Stream:
    """One Draft stream, on a connection of its own, for one shard.

    Raises:
        Unavailable: see `open_channel`.
        ConfigurationError: the file of the token or of a certificate cannot be read any more.
    """

    def __init__(self, core: Core, shard: Shard, state: StreamState) -> None:
        self.state = state
        self._core = core
        self._shard = shard
        caller = metadata(core.config)
        self._channel = open_channel(grpc.aio, shard.endpoint, core.config, longest=LONGEST_ANSWER)
        draft = self._channel.stream_stream(_DRAFT, request_serializer=pb.DraftRequest.SerializeToString)
        self._call = draft(metadata=caller)
        seconds = core.config.timeouts.silence
        topology: Any = rpc.DraftServiceStub(self._channel).Topology
        self._limits = topology(pb.TopologyRequest(), timeout=seconds, metadata=caller)
        self._reader = _task(self._read())
        self._writer: asyncio.Task[None] | None = None

    def kick(self) -> None:
        """Writes the messages in the outbox, in order; at most one write is in flight.

        Does nothing before the shard has answered on this connection: then `_connect` starts the writer.
        """
        if self.state.connected and (self._writer is None or self._writer.done()):
            self._writer = _task(self._write())

    async def _write(self) -> None:
        outbox = self.state.outbox
        try:
            while outbox:
                message = outbox.popleft()
                await self._call.write(message)
                self.state.wrote(message.sequence)
            if not self.state.owes:  # else the answer calls it
                self._core.changed()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream ended, and the reader reports it

    async def _connect(self) -> None:
        """Asks for the shard's limits before anything is written, on the same connection. So the shard is known to run.

        Raises:
            grpc.aio.AioRpcError: the shard does not answer, or refuses to.
        """
        await self._limits
        limits = ServerLimits.from_metadata(await self._limits.trailing_metadata())
        self._core.connected(self._shard, self.state, limits)
        self._core.changed()
        self.kick()

    async def _read(self) -> None:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server closed the stream"
        try:
            await self._connect()
            # Not by `read`: after a write that failed, it leaves the last answers of the server unread,
            # and gRPC then keeps the call for ever.
            async for text in self._call:
                self._core.reply(self._shard, self.state, self.state.parse(text))
                self._core.changed()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            if details.startswith(_TOO_LONG):
                code, details = grpc.StatusCode.DATA_LOSS, f"garbled reply: {details}"
        except GarbledReply as error:
            code, details = grpc.StatusCode.DATA_LOSS, f"garbled reply: {error}"
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, CLOSED_HERE
        except Exception as error:  # a bug, here or in gRPC, must not stop the worker
            log.exception("HistoSpec: %s: the stream failed", self._shard.name)
            code, details = grpc.StatusCode.INTERNAL, repr(error)
        self._core.end(self._shard, self.state, code, details)
        self._core.changed()
        await self.end()

    async def end(self) -> None:
        """Ends the stream and its connection."""
        self._call.cancel()
        self._limits.cancel()
        if asyncio.current_task() is not self._reader:
            await asyncio.wait([self._reader])
            return  # the reader closes the rest
        if self._writer is not None:
            self._writer.cancel()  # a write that flow control holds up would wait for ever
            await asyncio.wait([self._writer])
        await self._channel.close()

    def abandon(self) -> None:
        """Ends the stream after its loop was closed."""
        for call in (self._call, self._limits):
            with contextlib.suppress(RuntimeError):  # gRPC wakes tasks on the loop, after it has cancelled the call
                call.cancel()


def _run_now(callback: Callable[..., object], *args: Any, context: object = None) -> None:
    callback(*args)


def _ignore(*_: Any, context: object = None) -> None:
    pass


class Streams:
    """The streams of one client, made when first needed, and again after they broke."""

    def __init__(self, core: Core) -> None:
        self._core = core
        core.explain = partial(explain, core)
        self._streams: dict[Shard, Stream] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._discovery: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop on which they run; None before the first call."""

    def kick(self, shards: Sequence[Shard]) -> None:
        """Sends what the shards have in their outboxes. Called on the loop; does not wait."""
        self.discover()
        for shard in shards:
            if shard.stream is None:
                continue
            stream = self._streams.get(shard)
            if stream is None or stream.state is not shard.stream:
                self._discard(shard)
                try:
                    stream = self._streams[shard] = Stream(self._core, shard, shard.stream)
                except (Unavailable, ConfigurationError) as error:
                    self._core.end(shard, shard.stream, grpc.StatusCode.UNAVAILABLE, str(error))
                    self._core.changed()
                    continue
            stream.kick()

    def discover(self) -> None:
        """Starts the discovery of shards, if the configuration asks for it. Called on the loop; does not wait."""
        self.join()
        if self._core.config.discover:
            if self._discovery is None:
                self._discovery = _task(Discovery(self._core).run())
            for shard in [s for s in self._streams if s.left and s.settled]:
                self._discard(shard)

    def join(self) -> None:
        """Makes the running loop theirs. Raises WrongLoop if they have another one."""
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            state = "is closed" if self.loop.is_closed() else "is not the running one"
            raise WrongLoop(
                f"this client belongs to the event loop of its first call, {self.loop!r}, which {state}; "
                "make a client in each event loop, and shut it down there"
            )

    def found(self) -> bool:
        """Returns whether the client knows the shards, or knew them a moment ago."""
        return self._core.knows_shards()

    def _discard(self, shard: Shard) -> None:
        stream = self._streams.pop(shard, None)
        if stream is not None:
            task = _task(stream.end())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def abandon(self) -> None:
        """Ends all streams after their loop was closed or given up, as far as possible without it.

        gRPC reports the end of a call to the loop that made it, from any loop that turns, and logs an error if the
        former is closed. The closed loop is therefore made to accept the report and do nothing, so that its tasks, some
        of them gRPC's, are freed. May be called again after an interrupt.
        """
        if self.loop is not None:
            self.loop.set_exception_handler(_ignore)
            with contextlib.suppress(AttributeError):  # uvloop's loops do not allow it
                self.loop.call_soon_threadsafe = _run_now  # type: ignore[assignment, method-assign]
                self.loop.call_soon = _ignore  # type: ignore[assignment, method-assign]
        for stream in self._streams.values():
            stream.abandon()
        self._streams.clear()
        self._closing.clear()
        self.loop = self._discovery = None

    def give_up_loop(self) -> None:
        """Ends all streams after an interrupt ended a turn of their loop: tasks on it may have lost what they did."""
        self._core.lose_streams()
        self.abandon()

    async def end_all(self) -> None:
        """Ends all streams."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.wait([self._discovery])
        streams, self._streams = list(self._streams.values()), {}
        await asyncio.gather(*(s.end() for s in streams), *self._closing, return_exceptions=True)
