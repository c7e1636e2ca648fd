"""OpenTelemetry spans: one per call, and one per whole stream.

Active only with `--traces` or OpenTelemetry's own variables, and only with the extra `histospec[otel]`. Otherwise the
server imports none of it and wraps no call.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from structlog.contextvars import bind_contextvars

from histospec.server.errors import ConfigError
from histospec.server.settings.addresses import Address

log = structlog.get_logger()

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORT_SECONDS = 5.0  # an unreachable collector delays the end of a drain by at most this

Behaviour = Callable[[Any, Any], Awaitable[Any]]


def open_traces(collector: Address | None, shard: str) -> "Traces | None":
    """Returns None unless traces are requested. Raises ConfigError if `--traces` is given without the extra.

    OpenTelemetry's variables may be set for other programs on the machine: without the extra, they are ignored.
    """
    if collector is None and not any(map(os.environ.get, VARIABLES)):
        return None
    try:
        return Traces(collector, shard)
    except ImportError as error:
        text = f"needs OpenTelemetry ({error}): pip install 'histospec[otel]'"
        if collector is not None:
            raise ConfigError(f"--traces: {text}") from None
        log.info("no traces: " + text, variables=[name for name in VARIABLES if os.environ.get(name)])
        return None


class Traces:
    """Sends spans from a separate thread. Without `collector`, OpenTelemetry's variables name the destination."""

    def __init__(self, collector: Address | None, shard: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter = (
            OTLPSpanExporter(endpoint=f"http://{collector}", insecure=True, timeout=EXPORT_SECONDS)
            if collector
            else OTLPSpanExporter(timeout=EXPORT_SECONDS)
        )
        resource = Resource.create({"service.name": "histospec", "service.instance.id": shard})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("histospec.server")
        self._caller = TraceContextTextMapPropagator()
        self._trace = trace

    def traced(self, behaviour: Behaviour, service: str, method: str) -> Behaviour:
        """Wraps a handler in a span, which is a child of the caller's span if the call has a `traceparent`."""
        trace = self._trace
        about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

        async def run(request: Any, context: Any) -> Any:
            metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            with self._tracer.start_as_current_span(
                f"{service}/{method}",
                context=self._caller.extract(metadata),
                kind=trace.SpanKind.SERVER,
                attributes={**about, "network.peer.address": context.peer()},
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                bind_contextvars(trace_id=trace.format_trace_id(span.get_span_context().trace_id))
                code = grpc.StatusCode.OK
                try:
                    return await behaviour(request, context)
                except asyncio.CancelledError:
                    code = grpc.StatusCode.CANCELLED
                    raise
                except BaseException:
                    code = context.code() or grpc.StatusCode.UNKNOWN
                    raise
                finally:
                    span.set_attribute("rpc.grpc.status_code", code.value[0])
                    if code is grpc.StatusCode.INTERNAL:
                        span.set_status(trace.StatusCode.ERROR)

        return run

    async def close(self) -> None:
        """Sends queued spans, as far as the collector accepts them."""
        await asyncio.to_thread(self._provider.shutdown)
