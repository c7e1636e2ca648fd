"""Spans for an OpenTelemetry collector: one a call, one a whole stream.

Only where somebody asks for them, with `--traces` or OpenTelemetry's own variables, and only with the extra
`histospec[otel]`. Otherwise nothing of this is imported, and no call is wrapped.
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
EXPORT_SECONDS = 5.0  # a collector that is away holds up the end of a drain no longer

Behaviour = Callable[[Any, Any], Awaitable[Any]]


def open_traces(collector: Address | None, shard: str) -> "Traces | None":
    """None where nobody asks for traces. Raises ConfigError where `--traces` does and the extra is not installed.

    OpenTelemetry's variables may be meant for whatever runs on a machine: without the extra they are left aside.
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
    """Sends spans in a thread of its own. Where no collector is given, OpenTelemetry's variables say where to."""

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
        """The same, within a span, which belongs to that of the caller where it named one (`traceparent`)."""
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
        """Sends what waits, as far as the collector takes it."""
        await asyncio.to_thread(self._provider.shutdown)
