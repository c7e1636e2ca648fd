"""Spans as a real collector receives them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
trace_service_grpc = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

CALLER = "0af7651916cd43dd8448eb211c80319c"


class Collector(trace_service_grpc.TraceServiceServicer):  # type: ignore[misc, name-defined]
    """Collects every span by name."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        trace_service_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.spans |= {span.name.rpartition("/")[2]: span for span in scope.spans}
        return trace_service.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


def attributes(span: Any) -> dict[str, str | int]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


@pytest.mark.parametrize("asked", ["flag", "variable"])
def test_a_span_a_call_and_one_a_stream(
    start_server: Starter, connect: Connector, collector: Collector, asked: str
) -> None:
    if asked == "flag":
        server = start_server("--traces", f"otlp://{collector.address}")
    else:
        server = start_server(env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}"})
    wire = connect(server.endpoint)
    request = pb.IngestRequest(namespace="run", prompt=wire.i32([1]), responses=[pb.Response(tokens=wire.i32([2]))])
    wire.stub.Ingest(request, metadata=(("traceparent", f"00-{CALLER}-b7ad6b7169203331-01"),))
    with pytest.raises(grpc.RpcError):
        wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace=""))
    stream = wire.stream()
    for position in range(3):
        fields = {"opens": [wire.open(1)]} if not position else {}
        stream.ask(step=wire.step([1], [[5]], [position]), **fields)
    stream.end()
    server.terminate()
    assert server.wait() == 0  # queued spans were sent

    assert collector.spans.keys() == {"Ingest", "DropNamespace", "Draft"}
    assert collector.services == {"histospec"}
    assert collector.spans["Ingest"].trace_id.hex() == CALLER
    assert collector.spans["Draft"].trace_id.hex() != CALLER
    for name, code in {"Ingest": 0, "DropNamespace": 3, "Draft": 0}.items():
        span = collector.spans[name]
        assert attributes(span)["rpc.grpc.status_code"] == code
        assert attributes(span)["rpc.method"] == name
        assert span.kind == span.SPAN_KIND_SERVER
        assert span.end_time_unix_nano > span.start_time_unix_nano
    (ended,) = [entry for entry in server.log if entry["event"] == "draft stream ended"]
    assert ended["trace_id"] == collector.spans["Draft"].trace_id.hex()


def test_a_collector_that_is_away_holds_nobody_up(
    start_server: Starter, connect: Connector, collector: Collector
) -> None:
    collector.stop()
    server = start_server("--traces", f"otlp://{collector.address}")
    connect(server.endpoint).ingest([1], [[2]])
    server.terminate()
    assert server.wait() == 0


def test_who_does_not_ask_does_not_pay() -> None:
    """redis imports some of OpenTelemetry itself; no other package imports the part that sends spans."""
    code = "import sys, histospec.server.app; sys.exit(any('opentelemetry.exporter' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a server without OpenTelemetry."""
    package = tmp_path / "bare" / "opentelemetry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('No module named opentelemetry')")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))}


def test_traces_without_the_extra_are_refused(start_server: Starter, bare: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match=r"--traces: needs OpenTelemetry .*pip install 'histospec\[otel\]'"):
        start_server("--traces", "otlp://127.0.0.1:4317", env=bare)


def test_variables_without_the_extra_are_left_aside(
    start_server: Starter, connect: Connector, bare: dict[str, str]
) -> None:
    server = start_server(env={**bare, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"})
    connect(server.endpoint).ingest([1], [[2]])
    eventually(lambda: any(str(entry["event"]).startswith("no traces: needs") for entry in server.log))
