"""What the RPCs of our services have in common: it is timed, and its errors become gRPC statuses."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from structlog.contextvars import bind_contextvars

from histospec.server.errors import (
    HistoSpecError,
    InvalidRequest,
    LimitExceeded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    status_of,
)
from histospec.server.logs import Throttle, request_id
from histospec.server.metrics import Metrics
from histospec.server.traces import Traces
from histospec.server.wire import Undecodable, tolerant, unless_encoded
from histospec.specrl import rollout_cache_pb2
from histospec.v1 import draft_pb2

log = structlog.get_logger()

DRAFTS = draft_pb2.DESCRIPTOR.services_by_name["DraftService"]
SERVICE = DRAFTS.full_name
SPECRL = rollout_cache_pb2.DESCRIPTOR.services_by_name["RolloutCacheService"]
METHODS = {service.full_name: service.methods_by_name for service in (DRAFTS, SPECRL)}
EXPECTED = (InvalidRequest, LimitExceeded, PermissionDenied, Unauthenticated, Unavailable)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Accounting(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Counts and times the RPCs and reports their errors. The messages of a stream are timed by the stream."""

    def __init__(self, metrics: Metrics, traces: Traces | None = None) -> None:
        self._metrics = metrics
        self._traces = traces
        for method in chain.from_iterable(
            METHODS.values()
        ):  # an alert sees the first one only if there were none before
            metrics.rpc_errors.labels(method, grpc.StatusCode.INTERNAL.name)
        self._running = 0
        self._throttle = Throttle()

    async def idle(self) -> None:
        """Returns when no RPC of ours runs. Those of other services (a health watch) never end."""
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
        if handler is None or service not in METHODS:  # health and reflection speak for themselves
            return handler
        decode, encode = handler.request_deserializer, unless_encoded(handler.response_serializer)
        if decode is not None:
            decode = tolerant(METHODS[service][method].input_type.name, decode)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._traced(self._reported(handler.stream_stream, method), service, method),  # type: ignore[arg-type]
                decode,
                encode,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._traced(self._timed(self._reported(handler.unary_unary, method), method), service, method),  # type: ignore[arg-type]
            decode,
            encode,
        )

    def _traced(self, behaviour: Behaviour, service: str, method: str) -> Behaviour:
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
            # Every line of this call says so, those of the tasks that it starts, too.
            bind_contextvars(request_id=request_id(context.invocation_metadata() or ()))
            try:
                if isinstance(request, Undecodable):
                    request.refuse()
                return await behaviour(request, context)
            except HistoSpecError as error:
                code = status_of(error)
                say = log.info if isinstance(error, EXPECTED) else log.error
                if (more := self._throttle.admits((method, code))) is not None:
                    say("rpc refused", method=method, code=code.name, peer=context.peer(), reason=str(error), **more)
                self._metrics.rpc_errors.labels(method, code.name).inc()
                await context.abort(code, str(error))
            except Exception:
                log.exception("rpc failed", method=method, peer=context.peer())
                self._metrics.rpc_errors.labels(method, grpc.StatusCode.INTERNAL.name).inc()
                await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says how")
            finally:
                self._running -= 1

        return reported
