"""Bounds health and reflection calls, which need no token: the server receives little of them at a time.

gRPC has one size limit for messages of all services of a server, and receives a message only on request.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

MESSAGE_BYTES = 4096  # longer than any name of a service or a file
AT_A_TIME = 2  # messages received at a time from one host ...
WAITING = 64  # ... and calls that wait for their turn; further calls are refused
SECONDS = 5.0  # for a message to arrive

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Strangers:
    """Serves such RPCs. Used only on the event loop."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()  # by host: calls that receive or wait for their turn
        self._turns: dict[str, asyncio.Semaphore] = {}

    def serve(self, handler: "Handler") -> "Handler":
        """Returns a handler that receives each message in turn."""
        decode, encode = _short(handler.request_deserializer), handler.response_serializer
        if handler.request_streaming:
            behaviour: Any = handler.stream_stream

            async def stream(_: Any, context: Any) -> Any:
                async for answer in behaviour(self._received(context), context):
                    yield answer

            return grpc.stream_stream_rpc_method_handler(stream, decode, encode)
        behaviour = handler.unary_stream or handler.unary_unary

        async def single(_: Any, context: Any) -> Any:
            request = await self._receive(context)
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
            return await behaviour(request, context)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(single, decode, encode)
        return grpc.stream_unary_rpc_method_handler(single, decode, encode)

    async def _received(self, context: Any) -> AsyncIterator[Any]:
        while (request := await self._receive(context)) is not None:
            yield request

    async def _receive(self, context: Any) -> Any:
        """Returns the next message; None after the last. Aborts the call if it is too long or does not arrive."""
        host = context.peer().rpartition(":")[0]
        if self._calls[host] >= WAITING:
            text = f"{WAITING} calls of this host are already waiting; retry later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._calls[host] += 1
        turn = self._turns.setdefault(host, asyncio.Semaphore(AT_A_TIME))
        try:
            async with turn:
                request = await asyncio.wait_for(context.read(), SECONDS)
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no message for {SECONDS:g} seconds")
        finally:
            self._calls[host] -= 1
            if not self._calls[host]:
                del self._calls[host], self._turns[host]
        if request is None:
            text = f"the message does not fit this RPC, or is longer than {MESSAGE_BYTES} bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return None if request is grpc.aio.EOF else request  # type: ignore[attr-defined] # missing in the stubs


def _short(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Returns a decoder that gives None for a message that is too long or of another type."""
    assert decode is not None

    def decode_short(data: bytes) -> Any:
        try:
            return decode(data) if len(data) <= MESSAGE_BYTES else None
        except Exception:
            return None

    return decode_short
