"""Start, readiness, drain and stop of a real process."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from histospec.server.machine import cpu_limit, drafting_threads
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support import drains
from tests.support.servers import Server, Starter, run_first
from tests.support.waiting import eventually
from tests.support.wires import Connector, Wire

SERVICE = "histospec.v1.DraftService"


def health(wire: Wire) -> str:
    answer = health_pb2_grpc.HealthStub(wire.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_the_log_says_where_it_listens(start_server: Starter) -> None:
    server = start_server("--listen", "127.0.0.1:0")
    [listening] = [entry for entry in server.log if entry["event"] == "listening"]
    assert listening["grpc"] == server.endpoint
    assert not server.endpoint.endswith(":0")
    assert listening["data_dir"] == str(server.data_dir)


@pytest.mark.parametrize(("flags", "threads"), [((), drafting_threads(cpu_limit())), (("--threads", "3"), 3)])
def test_the_log_says_how_many_threads_draft(
    start_server: Starter, flags: tuple[()] | tuple[str, str], threads: list[str]
) -> None:
    server = start_server(*flags)
    assert [entry["threads"] for entry in server.log if entry["event"] == "listening"] == [threads]


def test_health_pages(server: Server) -> None:
    assert server.get("/livez") == (200, "ok\n")
    assert server.get("/readyz") == (200, "ok\n")
    status, text = server.get("/healthz")
    assert status == 200
    assert '"ready": true' in text
    assert server.get("/nothing")[0] == 404


def test_standard_health_and_reflection(server: Server, wire: Wire) -> None:
    assert health(wire) == "SERVING"
    watch = health_pb2_grpc.HealthStub(wire.channel).Watch(health_pb2.HealthCheckRequest(service=""))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(wire.channel)
    assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
    assert database.FindFileContainingSymbol(SERVICE).service[0].method[0].name == "Draft"


@pytest.fixture
def stored(tmp_path: Path) -> list[list[int]]:
    """The contents of the store of the server `full`: one response for each of 400 prompts [0, 1], [1, 1], …"""
    texts = np.random.default_rng(0).integers(0, 50_000, (400, 500)).astype("<i4")
    store = SQLiteStore(tmp_path / "full", history_epochs=8)
    for number, text in enumerate(texts):
        problem = Problem("run", np.array([number, 1], "<i4").tobytes())
        store.append(ResponseBatch(problem, [Record(text.tobytes(), 0)]))
    store.rewind("none", 0).result()
    store.close()
    return [text.tolist() for text in texts]


@pytest.fixture
def loads_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Servers load a page of problems per tenth of a second until this file exists; then at full speed."""
    told = tmp_path / "told"
    code = f"""
import time
from pathlib import Path
from histospec.server.stores.sqlite import reader, store
reader.PROBLEMS_AT_ONCE = 1
pages = store.SQLiteStore.wanted_first
def slowly(self):
    for page in pages(self):
        time.sleep(0 if Path({str(told)!r}).exists() else 0.1)
        yield page
store.SQLiteStore.wanted_first = slowly
"""
    run_first(code, tmp_path, monkeypatch)
    return told


def drafts(wire: Wire, session: int, number: int, text: list[int]) -> Callable[[], bool]:
    """Returns whether a session of a stored prompt gets the stored draft once its problem is read."""
    stream, position = wire.stream(), 20
    stream.ask(opens=[wire.open(session, [number, 1])], step=wire.step([session], [text[:20]]))

    def drafted() -> bool:
        nonlocal position
        (draft,) = wire.drafts(stream.ask(step=wire.step([session], [text[position : position + 1]], [position])))
        position += 1
        return draft[:3] == text[position : position + 3]

    return drafted


def test_a_server_is_ready_before_its_store_is_loaded(
    start_server: Starter, connect: Connector, stored: list[list[int]], loads_when_told: Path
) -> None:
    """
    1. The server is ready, accepts responses and reports its progress while it loads the most relevant problems.
    2. The first session on the problem that is loaded last finds its history.
    3. After loading, it has everything once, including what was read on demand and ingested meanwhile.
    """
    server = start_server(name="full", ready=False)
    wire = connect(server.endpoint)
    eventually(lambda: server.get("/readyz") == (200, "ok\n"), "it does not become ready")
    assert health(wire) == "SERVING"
    assert server.metrics()["histospec_loading"] == 1
    eventually(drafts(wire, 1, 0, stored[0]), "the history of a problem that is not loaded yet is not found")
    assert wire.ingest([1, 1], [[5, 6]]).responses == 1
    assert wire.ingest([999], [[5, 6]]).responses == 1
    progress = re.compile(r"loading [1-9]\d* of 40[0-2] responses")
    eventually(lambda: progress.fullmatch(json.loads(server.get("/healthz")[1])["parts"]["store"]), "nothing is said")
    assert server.metrics()["histospec_loading"] == 1
    assert 0 < server.metrics()["histospec_loaded_responses"] < 400
    loads_when_told.touch()
    server.until_loaded()
    assert server.metrics()["histospec_loaded_responses"] == 400
    assert server.metrics()["histospec_history_tokens"] == 400 * 500 + 4
    assert json.loads(server.get("/healthz")[1])["parts"]["store"] == "ok"


def test_a_server_that_is_told_to_end_while_it_loads_ends(
    start_server: Starter, stored: list[list[int]], loads_when_told: Path, connect: Connector
) -> None:
    """The next server has everything, also after a kill during loading."""
    server = start_server(name="full", ready=False)
    eventually(lambda: server.metrics()["histospec_loaded_responses"] > 0, "it loads nothing")
    server.drain()
    assert not [line for line in server.log if str(line["event"]).startswith("loaded")]
    server.start(ready=False)
    eventually(lambda: server.metrics()["histospec_loaded_responses"] > 0, "it loads nothing")
    server.kill()
    loads_when_told.touch()
    server.start()
    assert server.metrics()["histospec_loaded_responses"] == 400
    wire = connect(server.endpoint)
    assert [wire.history([number, 1]) for number in (0, 200, 399)] == [[stored[n]] for n in (0, 200, 399)]


def test_a_drain_lets_running_sessions_finish(start_server: Starter, connect: Connector) -> None:
    server = start_server("--drain-seconds", "60")
    wire = connect(server.endpoint)
    busy, idle = wire.stream(), wire.stream()
    busy.ask(opens=[wire.open(1), wire.open(2)], step=wire.step([1, 2], [[5], [6]]))
    idle.ask(step=wire.step([], []))
    watch = health_pb2_grpc.HealthStub(wire.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING

    server.terminate()
    # A stream without sessions ends, and new calls are refused ...
    error = idle.error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in str(error.details())
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.RpcError) as caught:
        connect(server.endpoint).ingest([1], [[2]])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.get("/readyz") == (503, "drain: draining\n")
    assert server.get("/livez")[0] == 200
    # ... while running sessions continue, commit, and end their stream with the last of them.
    assert wire.unknown(busy.ask(step=wire.step([1, 2], [[7], [8]], [1, 1]))) == []
    busy.ask(closes=[wire.commit(1, 2), wire.commit(2, 2)])
    assert busy.error().code() is grpc.StatusCode.UNAVAILABLE
    assert server.wait() == 0
    server.start()
    assert sorted(wire.history([1, 2, 3], wait=True)) == [[5, 7], [6, 8]]


def test_a_drain_ends_after_its_limit(start_server: Starter, connect: Connector) -> None:
    server = start_server("--drain-seconds", "0.5")
    wire = connect(server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    server.terminate()
    assert stream.error().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert server.wait() == 0


def test_streams_that_are_cut_off_never_crash_the_server(tmp_path: Path) -> None:
    """About one in twenty crashed when two calls asked gRPC to cut off the remaining streams."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")}
    command = [sys.executable, "-m", drains.__name__, "60", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "60"


def test_a_second_signal_stops_at_once(start_server: Starter, connect: Connector) -> None:
    server = start_server("--drain-seconds", "3600")
    wire = connect(server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    assert wire.ingest([1, 2, 3], [[5, 6]]).responses == 1
    server.terminate()
    eventually(lambda: server.get("/readyz")[0] == 503, "the drain never showed")
    server.terminate()
    assert server.wait() == 1
    server.start()
    assert wire.history([1, 2, 3], wait=True) == [[5, 6]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_and_a_terminal_that_closes_drain_too(
    start_server: Starter, connect: Connector, number: int
) -> None:
    server = start_server("--drain-seconds", "3600", ignoring=[signal.SIGINT])
    wire = connect(server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    server.signal(number)
    eventually(lambda: server.get("/readyz")[0] == 503, "the drain never showed")
    stream.ask(closes=[wire.commit(1, 1)])
    assert server.wait() == 0
    events = [entry["event"] for entry in server.log]
    assert "draining" in events
    assert events[-1] == "stopped"
    server.start()
    assert wire.history([1, 2, 3], wait=True) == [[5]]


def test_a_terminal_that_closes_may_say_so_twice_but_another_signal_stops_at_once(
    start_server: Starter, connect: Connector
) -> None:
    server = start_server("--drain-seconds", "3600")
    wire = connect(server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    server.signal(signal.SIGHUP)
    server.signal(signal.SIGHUP)
    eventually(lambda: server.get("/readyz")[0] == 503, "the drain never showed")
    assert wire.unknown(stream.ask(step=wire.step([1], [[7]], [1]))) == []
    server.terminate()
    assert server.wait() == 1


def test_a_server_that_nohup_started_outlives_its_terminal(start_server: Starter) -> None:
    server = start_server(ignoring=[signal.SIGHUP])
    server.signal(signal.SIGHUP)
    server.terminate()
    assert server.wait() == 0  # one signal, not two


def test_no_thread_of_ours_outlives_the_store(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    SQLiteStore(tmp_path, history_epochs=8).close()
    assert set(threading.enumerate()) == before
