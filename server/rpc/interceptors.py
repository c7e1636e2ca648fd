"""The common part of our RPCs: authorises and times them, and turns their errors into gRPC statuses.

The metadata of a call authorises it before gRPC receives a message, so the server reads nothing from strangers. All
unary methods are served as streams, because gRPC receives the message of a stream only on request.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from structlog.contextvars import bind_contextvars

from histospec.protocol.limits import MAX_QUANTILES
from histospec.server.errors import (
    HistoSpecError,
    InvalidRequest,
    Late,
    LimitExceeded,
    PermissionDenied,
    StoreOpening,
    Unauthenticated,
    Unavailable,
    status_of,
)
from histospec.server.logs.lines import Throttle, request_id
from histospec.server.observability.metrics import Metrics
from histospec.server.observability.traces import Traces
from histospec.server.rpc import specrl
from histospec.server.rpc.answering import Answering
from histospec.server.rpc.arrivals import READ_PACE, Arrivals, NoMessage, caller, sized
from histospec.server.rpc.connections import peer_of
from histospec.server.rpc.encoded import Undecodable, bounded, shape, tolerant, unless_encoded
from histospec.server.rpc.slices import unless_large
from histospec.server.security.access import SET_TOKEN, Access, Right
from histospec.server.security.rejections import REJECTED, Rejections
from histospec.server.settings.config import Config
from histospec.specrl import rollout_cache_pb2
from histospec.v1 import draft_pb2

log = structlog.get_logger()

DRAFTS = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]
SPECRL = rollout_cache_pb2.DESCRIPTOR.services_by_name["RolloutCacheService"]
METHODS = {service.full_name: service.methods_by_name for service in (DRAFTS, SPECRL)}
# Limits of unauthenticated calls.
SHORT_BYTES = 4096  # of a message; longer than any name of a service or a file
PENDING_CALLS = 64  # calls of one host whose message has not arrived; further ones are refused
MESSAGE_SECONDS = 2.0  # for a message to arrive; long ones must not arrive side by side

RIGHTS: dict[str, Right] = {
    "Draft": "read", "History": "read", "PredictLength": "read", "PredictLengths": "read",
    "Ingest": "write",
    "DropNamespace": "admin", "Rewind": "admin", "Export": "admin", "Import": "admin",
}  # fmt: skip
"""By method, the right that a token must have in some namespace before the server reads its request."""

IN_TURN = ("History", "Inspect", "PredictLengths")
"""Methods whose answers may be long, or take long: a few of them are made at the same time. One may return a function
that makes a large answer, see `Answering.write_large`."""

EXPECTED = (InvalidRequest, Late, LimitExceeded, StoreOpening, Unavailable)

ALERTED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
Behaviour = Callable[[Any, Any], Awaitable[Any]]


def checks(config: Config) -> dict[str, Callable[[bytes], None]]:
    """Returns, by request name, a check that refuses a request which would decode to more than this server accepts."""
    limits = {
        "PredictLengthRequest.quantiles": MAX_QUANTILES,
        "PredictLengthsRequest.quantiles": MAX_QUANTILES,
        "TokenList.tokens": config.max_message,  # `specrl` counts them itself
    }
    requests = [method.input_type for methods in METHODS.values() for method in methods.values()]
    shapes = {request.name: shape(request, limits, config.max_batch) for request in requests}
    return {name: bounded(each, config.max_batch) for name, each in shapes.items()}


class Accounting(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Authorises, counts and times the RPCs, and reports their errors. A stream times its own messages."""

    def __init__(
        self, metrics: Metrics, config: Config, access: Access, answering: Answering, traces: Traces | None = None
    ) -> None:
        self._metrics = metrics
        self._config = config
        self._access = access
        self._checks = checks(config)
        self._traces = traces
        self._answering = answering
        # Unary calls by the right that they need: those of one kind do not delay those of another.
        self._arrivals: dict[Right, Arrivals] = {
            "read": Arrivals(metrics, pace=READ_PACE), "write": Arrivals(metrics), "admin": Arrivals(metrics)
        }  # fmt: skip
        for method in chain.from_iterable(METHODS.values()):
            for code in ALERTED:  # an alert sees the first error only if the series was 0 before
                metrics.rpc_errors.labels(method, code.name)
        self._unauthenticated = UnauthenticatedCalls(answering, metrics)
        self.arrivals = [*self._arrivals.values(), self._unauthenticated.arrivals]
        """Unary calls whose message has not arrived."""
        self._served: dict[str, Handler] = {}  # by the full name of a method
        self._running = 0
        self._throttle = Throttle()
        self.rejections = Rejections()

    async def idle(self) -> None:
        """Returns when no RPC of ours runs. RPCs of other services, such as a health watch, never end."""
        while self._running:
            await asyncio.sleep(0.01)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        """See grpc.aio."""
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler is None:
            return handler
        if service in METHODS:  # health and reflection need no token
            try:
                remedy = specrl.NO_TOKEN if service == SPECRL.full_name else SET_TOKEN
                permit = self._access.permit(dict(handler_call_details.invocation_metadata or ()), remedy)
                if service == SPECRL.full_name:
                    permit.require("write", self._config.specrl_namespace)
                elif method in RIGHTS:
                    permit.require_somewhere(RIGHTS[method])
            except (Unauthenticated, PermissionDenied) as error:
                return self._refusal(handler, service, method, error)
        served = self._served.get(handler_call_details.method)
        if served is None:
            served = self._served[handler_call_details.method] = self._serve(handler, service, method)
        return served

    def _serve(self, handler: "Handler", service: str, method: str) -> "Handler":
        if service not in METHODS:
            return self._unauthenticated.serve(handler)
        behaviour: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
        decode, encode = self._decoder(service, method, handler), unless_encoded(handler.response_serializer)
        if handler.stream_stream:
            accounted: Any = self._accounted(behaviour, handler, service, method)
            return grpc.stream_stream_rpc_method_handler(accounted, decode, encode)
        if service == SPECRL.full_name:  # it receives the message itself
            accounted = self._accounted(behaviour, handler, service, method)
            return grpc.stream_unary_rpc_method_handler(accounted, sized(decode), encode)
        accounted = self._accounted(behaviour, handler, service, method, encode)
        return grpc.stream_stream_rpc_method_handler(accounted, sized(decode), None)

    def _received(self, behaviour: Behaviour, method: str, encode: Callable[[Any], bytes], streams: bool) -> Behaviour:
        """Returns a stream's behaviour for that of a unary call: it receives and answers within bounds."""
        arrivals = self._arrivals[RIGHTS.get(method, "read")]
        seconds = self._metrics.rpc_seconds.labels(method)
        in_turn = method in IN_TURN

        async def received(unread: Any, context: Any) -> None:
            permit = self._access.permit(dict(context.invocation_metadata() or ()))
            who, peer = caller(permit, context), peer_of(context.peer())
            async with arrivals.receive(context, who) as request:
                with nullcontext() if streams else seconds.time():
                    async with self._answering.turn(method, who, peer) if in_turn else nullcontext():
                        answer = await behaviour(request, context)
                    del request
                    if callable(answer):
                        await self._answering.write_large(context, who, answer)
                        return
            if answer is not None:
                await self._answering.write(context, encode(answer), waits=not in_turn)

        return received

    def _refusal(self, handler: "Handler", service: str, method: str, error: HistoSpecError) -> "Handler":
        """Answers without reading: gRPC receives the message of a stream only on request."""

        async def refuse(unread: Any, context: Any) -> None:
            raise error

        behaviour: Any = self._accounted(refuse, handler, service, method)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(behaviour)
        return grpc.stream_unary_rpc_method_handler(behaviour)

    def _decoder(self, service: str, method: str, handler: "Handler") -> Callable[[bytes], Any]:
        kind = METHODS[service][method].input_type.name
        if service == SPECRL.full_name:
            return tolerant(kind, lambda data: specrl.read(data, self._config), self._checks[kind])
        decode = handler.request_deserializer
        assert decode is not None
        return tolerant(kind, unless_large(decode) if handler.stream_stream else decode, self._checks[kind])

    def _accounted(
        self,
        behaviour: Behaviour,
        handler: "Handler",
        service: str,
        method: str,
        encode: Callable[[Any], bytes] | None = None,
    ) -> Behaviour:
        """Returns what gRPC calls. With `encode`, it receives the request and writes the answer of a unary call."""
        if encode is not None:
            behaviour = self._received(behaviour, method, encode, handler.response_streaming)
        elif not handler.response_streaming:
            behaviour = self._timed(behaviour, method)
        behaviour = self._reported(behaviour, method)
        return behaviour if self._traces is None else self._traces.traced(behaviour, service, method)

    def _timed(self, behaviour: Behaviour, method: str) -> Behaviour:
        seconds = self._metrics.rpc_seconds.labels(method)

        async def timed(request: Any, context: Any) -> Any:
            started = time.perf_counter()
            try:
                return await behaviour(request, context)
            finally:
                seconds.observe(time.perf_counter() - started)

        return timed

    def _reported(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def reported(request: Any, context: Any) -> Any:
            self._running += 1
            # Every log line of this call has these values, also in tasks that it starts.
            bind_contextvars(request_id=request_id(context.invocation_metadata() or ()))
            try:
                try:
                    return await behaviour(request, context)
                except REJECTED as error:
                    code, reason = status_of(error), str(error)
                    self.rejections.add(method, code.name, context.peer(), reason)
                except HistoSpecError as error:
                    code, reason = status_of(error), str(error)
                    say = log.info if isinstance(error, EXPECTED) else log.error
                    if (more := self._throttle.admits((method, code))) is not None:
                        say("rpc refused", method=method, code=code.name, peer=context.peer(), reason=reason, **more)
                except grpc.aio.InternalError:
                    raise asyncio.CancelledError from None  # the caller left while the server wrote or read
                except Exception:
                    code, reason = grpc.StatusCode.INTERNAL, "the server failed; see its log"
                    log.exception("rpc failed", method=method, peer=context.peer())
                # Not above: what `abort` raises would keep the error.
                self._metrics.rpc_errors.labels(method, code.name).inc()
                await context.abort(code, reason)
            finally:
                self._running -= 1

        return reported


class UnauthenticatedCalls:
    """Health and reflection calls, which need no token: their messages are short.

    gRPC has one size limit for messages of all services of a server, and receives a message only on request. Used only
    on the event loop.
    """

    def __init__(self, answering: Answering, metrics: Metrics) -> None:
        self._answering = answering
        # No pause: other callers of a host check the health of the server, too.
        self.arrivals = Arrivals(
            metrics, pending_each=PENDING_CALLS, seconds=MESSAGE_SECONDS, moment=MESSAGE_SECONDS, pause=0
        )

    def serve(self, handler: "Handler") -> "Handler":
        """Returns a handler that receives each message in turn."""
        decode, encode = sized(_short(handler.request_deserializer)), unless_encoded(handler.response_serializer)
        behaviour: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary

        async def serve(_: Any, context: Any) -> None:
            host = peer_of(context.peer()).rpartition(":")[0]
            if handler.request_streaming:
                async for answer in behaviour(self._messages(context, host), context):
                    await self._answering.write(context, encode(answer))
                return
            async with self.arrivals.receive(context, host) as request:
                pass
            if handler.response_streaming:
                await behaviour(request, context)
            else:
                await self._answering.write(context, encode(await behaviour(request, context)))

        async def reported(unread: Any, context: Any) -> None:
            try:
                await serve(unread, context)
            except HistoSpecError as error:
                await context.abort(status_of(error), str(error))
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None  # the caller left

        return grpc.stream_stream_rpc_method_handler(reported, decode, None)

    async def _messages(self, context: Any, host: str) -> AsyncIterator[Any]:
        while True:
            try:
                async with self.arrivals.receive(context, host) as request:
                    pass
            except NoMessage:
                return
            yield request


def _short(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Returns a decoder that gives Undecodable for a message that is too long or of another type."""
    assert decode is not None

    def decode_short(data: bytes) -> Any:
        try:
            if len(data) <= SHORT_BYTES:
                return decode(data)
        except Exception:
            pass  # protobuf and reflection raise errors of several types
        return Undecodable(InvalidRequest(f"message: does not fit this RPC, or has more than {SHORT_BYTES} bytes"))

    return decode_short
