"""Makes single calls for both clients, over channels of their own, and in smaller pieces if a call was too large."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from histospec.client import fork
from histospec.client.core.core import Core
from histospec.client.errors import Unavailable, from_status
from histospec.client.transport import calls
from histospec.client.transport.calls import Call
from histospec.client.transport.channel import metadata, open_channel
from histospec.client.transport.lifetime import LoopConnections, PumpedConnections
from histospec.client.transport.stream import Streams
from histospec.v1 import draft_pb2_grpc as rpc

P = ParamSpec("P")
T = TypeVar("T")


class BlockingCalls:
    """The single calls of a blocking client, in the thread of the caller."""

    def __init__(self, core: Core, streams: Streams, connections: PumpedConnections) -> None:
        self._core = core
        self._streams = streams
        self._pump = connections.pump
        self._channels = connections.channels
        self._lock = threading.Lock()
        self._ended = False

    def end(self) -> bool:
        """Ends the calls: later ones raise Unavailable. Returns False if they had ended before."""
        with self._lock:
            before, self._ended = self._ended, True
        return not before

    def do(self, build: Callable[Concatenate[Core, P], list[Call[T]]], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Finds the shards, then makes the calls that `build` returns. Returns their results."""
        self.find()
        return [self.one(call) for call in build(self._core, *args, **kwargs)]

    def find(self, timeout: float | None = None) -> None:
        """Waits until the client knows the shards; while it steps, it always knows them."""
        fork.refuse()
        patience = self._core.config.timeouts.call if timeout is None else timeout
        if not (self._streams.found() or self._ended):
            self._pump.run(self._streams.discover, patience)
            self._pump.wait(self._streams.found, patience)

    def one(self, call: Call[T]) -> T:
        """Makes one call."""
        endpoint, config = call.endpoint, self._core.config
        with self._lock:
            channel = self._channels.get(endpoint)
            if self._ended:
                raise _shut_down(call)
            if channel is None:
                channel = open_channel(grpc, endpoint, config)
                self._channels[endpoint] = channel
        method = getattr(rpc.DraftServiceStub(channel), call.method)
        try:
            return call.finish(method(call.request, timeout=call.timeout, metadata=metadata(config)))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                # With this channel, calls would fail until gRPC's back-off ends; a new channel connects at once.
                with self._lock:
                    if self._channels.get(endpoint) is channel:
                        del self._channels[endpoint]
                self._core.looked = -math.inf  # the shard may have moved
            pieces = _pieces(call, error, self._core)
        return call.join([self.one(piece) for piece in pieces])


class LoopCalls:
    """The single calls of an asyncio client. `until` waits for a condition, at most a number of seconds."""

    def __init__(
        self,
        core: Core,
        streams: Streams,
        connections: LoopConnections,
        until: Callable[[Callable[[], bool], float], Awaitable[None]],
    ) -> None:
        self._core = core
        self._streams = streams
        self._channels = connections.channels
        self._until = until

    async def do(
        self, build: Callable[Concatenate[Core, P], list[Call[T]]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """See BlockingCalls."""
        await self.find()
        return [await self.one(call) for call in build(self._core, *args, **kwargs)]

    async def find(self, timeout: float | None = None) -> None:
        """See BlockingCalls."""
        fork.refuse()
        if not (self._streams.found() or self._core.closed):
            self._streams.discover()
            await self._until(self._streams.found, self._core.config.timeouts.call if timeout is None else timeout)

    async def one(self, call: Call[T]) -> T:
        """See BlockingCalls."""
        endpoint, config = call.endpoint, self._core.config
        channel = self._channels.get(endpoint)
        if self._core.closed:
            raise _shut_down(call)
        if channel is None:
            self._streams.loop = asyncio.get_running_loop()
            channel = open_channel(grpc.aio, endpoint, config)
            self._channels[endpoint] = channel
        method = getattr(rpc.DraftServiceStub(channel), call.method)
        try:
            return call.finish(await method(call.request, timeout=call.timeout, metadata=metadata(config)))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._channels.get(endpoint) is channel:
                del self._channels[endpoint]  # see BlockingCalls
                self._core.looked = -math.inf
            pieces = _pieces(call, error, self._core)
        return call.join([await self.one(piece) for piece in pieces])


def _shut_down(call: Call[Any]) -> Unavailable:
    return Unavailable(f"{call.what}: this client is shut down")


def _pieces(call: Call[T], error: grpc.RpcError, core: Core) -> list[Call[T]]:
    """Returns a failed call in smaller calls. Raises its error if its size is not the reason."""
    details = error.details()
    pieces = calls.smaller(call, details or "", core.config.limits)
    if not pieces:
        raise from_status(error.code(), details, call.what) from error
    return pieces
