"""Tenants share a server: none takes the namespaces, the store, the index or the sessions from the others."""

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.native import Engine
from histospec.server.errors import ConfigError
from histospec.server.history.tenants import KEPT, Tenants
from histospec.server.security.access import Access
from histospec.server.stores.interface import StoreSize
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server, Starter, secret
from tests.support.waiting import eventually
from tests.support.wires import Connector, Stream, Wire

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
FILE = """
[[token]]
name = "a"
secret = "{a}"
namespaces = ["a-*"]
{shares}
[[token]]
name = "b"
secret = "{b}"
namespaces = ["b-*"]
"""


class Caller:
    """Calls with the token of one tenant."""

    def __init__(self, wire: Wire, name: str) -> None:
        self.wire = wire
        self.name = name
        self.metadata = (("authorization", f"Bearer {secret(name)}"),)

    def ingest(self, *args: Any, **fields: Any) -> pb.IngestResponse:
        return self.wire.stub.Ingest(self.request(*args, **fields), metadata=self.metadata)

    def request(self, prompt: int, namespace: str = "", tokens: int = 2, problem: str = "") -> pb.IngestRequest:
        text = np.random.default_rng(prompt).integers(0, 1 << 31, tokens).astype("<i4").tobytes()
        return pb.IngestRequest(
            namespace=namespace or f"{self.name}-run",
            prompt=self.wire.i32([prompt]),
            responses=[pb.Response(tokens=text)],
            problem=problem,
        )

    def stream(self) -> Stream:
        return Stream(self.wire.stub, self.metadata)


@pytest.fixture
def start(start_server: Starter, connect: Connector, tmp_path: Path) -> Any:
    """start(*flags, shares="") starts a server with two tenants. Returns it and a caller of each."""

    def start_(*flags: str, shares: str = "") -> tuple[Server, Caller, Caller]:
        path = tmp_path / "tokens.toml"
        path.write_text(FILE.format(a=secret("a"), b=secret("b"), shares=shares))
        server = start_server("--tokens", str(path), *flags)
        wire = connect(server.endpoint)
        return server, Caller(wire, "a"), Caller(wire, "b")

    return start_


def refused(error: grpc.RpcError) -> str:
    assert error.code() is FULL
    return str(error.details())


def fill(caller: Caller, most: int, **fields: Any) -> tuple[int, str]:
    """Ingests until the server refuses. Returns how many it took, and why it refused."""
    for number in range(most):
        namespace = f"{caller.name}-{number}" if fields.get("namespaces") else ""
        try:
            problem = f"{number}{fields['problem']}" if "problem" in fields else ""
            caller.ingest(number, namespace, fields.get("tokens", 2), problem)
        except grpc.RpcError as error:
            return number, refused(error)
    return most, ""


def test_a_tenant_that_creates_namespaces_leaves_some_to_others(start: Any) -> None:
    server, a, b = start("--max-namespaces", "512")
    part = 512 // KEPT["namespaces"] // 2
    taken, why = fill(a, 513, namespaces=True)
    assert taken == 512 - part
    assert why == f"namespaces: tenant 'a' uses {taken} of 512; the rest is kept for other tenants"
    assert fill(b, 513, namespaces=True)[0] == part
    assert server.metrics()['histospec_tenant_used{resource="namespaces",tenant="a"}'] == taken
    assert server.metrics()['histospec_tenant_refusals_total{resource="namespaces",tenant="a"}'] == 1
    # The same after a restart.
    server.restart()
    eventually(lambda: server.metrics()['histospec_tenant_used{resource="namespaces",tenant="a"}'] == taken)
    with pytest.raises(grpc.RpcError) as caught:
        a.ingest(1, "a-more")
    assert "limit of 512 namespaces" in refused(caught.value)


def test_each_of_many_tenants_has_a_namespace(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(12)]
    path = tmp_path / "tokens.toml"
    path.write_text("".join(f'[[tenant]]\nname = "{name}"\nnamespaces = ["{name}-*"]\n' for name in names))
    tenants, whole = Tenants(Access(path), Engine(1 << 20)), 64
    for name in names:
        while not tenants.refusal("namespaces", name, 1, whole, tenants.namespaces.total()):
            tenants.admitted(f"{name}-{tenants.namespaces[name]}", name)
    assert [tenants.namespaces[name] for name in names] == [whole - 11, *[1] * 11]


def test_a_share_of_the_token_file_holds(start: Any) -> None:
    server, a, b = start(shares="shares = {namespaces = 3, sessions = 2}")
    assert fill(a, 9, namespaces=True) == (
        3,
        "namespaces: tenant 'a' uses all of its share of 3 (shares.namespaces in the token file)",
    )
    assert fill(b, 9, namespaces=True) == (9, "")
    for caller, wanted in ((a, 2), (b, 5)):
        wire = caller.wire
        opens = [wire.open(session, [session], f"{caller.name}-0") for session in range(1, 6)]
        stream = caller.stream()
        answer = stream.ask(opens=opens, step=wire.step([1, 2], [[5], [6]]))
        assert len(answer.refusals) == 5 - wanted
        assert all("sessions: tenant 'a' uses all of its share of 2" in one.reason for one in answer.refusals)
        stream.cancel()
    status = json.loads(server.get("/status")[1])
    [mine] = [tenant for tenant in status["tenants"] if tenant["name"] == "a"]
    assert (mine["namespaces"], mine["namespaces_share"], mine["refusals"]) == (3, 3, 4)
    # Closed sessions give their places back.
    eventually(lambda: server.metrics()['histospec_tenant_used{resource="sessions",tenant="a"}'] == 0)


def test_sessions_that_open_at_once_do_not_exceed_a_share(start: Any) -> None:
    """On many streams, with prompts that take a while."""
    server, a, _ = start(shares="shares = {sessions = 2}")
    streams = [a.stream() for _ in range(20)]
    for number, stream in enumerate(streams):
        stream.send(opens=[a.wire.open(1, range(number, 17_000), "a-run")], step=a.wire.step([], []))
    assert sum(len(stream.receive().refusals) for stream in streams) == 18
    assert server.metrics()['histospec_tenant_used{resource="sessions",tenant="a"}'] == 2
    for stream in streams:
        stream.cancel()
    eventually(lambda: server.metrics()['histospec_tenant_used{resource="sessions",tenant="a"}'] == 0)


def test_a_tenant_that_fills_the_store_leaves_some_to_others(start: Any) -> None:
    server, a, b = start("--disk", "64MiB")
    b.ingest(0)
    eventually(lambda: server.metrics()['histospec_tenant_used{resource="store",tenant="b"}'] > 0)
    taken, why = fill(a, 200, tokens=100_000)
    assert 100 < taken < 200
    assert why.startswith("store: tenant 'a' uses ")
    assert "of 64MiB; the rest is kept for other tenants" in why
    for number in range(5):
        b.ingest(1000 + number, tokens=100_000)


def test_names_count_for_a_share_of_the_store(start: Any) -> None:
    _, a, _ = start(shares='shares = {store = "1MiB"}')
    taken, why = fill(a, 200, problem=1000 * "\U0001f600")
    assert 100 < taken < 150
    assert "tenant 'a' uses all of its share of 1MiB" in why


def test_ingests_at_once_do_not_exceed_a_share_of_the_store(start: Any) -> None:
    _, a, _ = start(shares='shares = {store = "1MiB"}')
    requests = [a.request(number, tokens=100_000) for number in range(20)]
    calls = [a.wire.stub.Ingest.future(request, metadata=a.metadata) for request in requests]
    reasons = [refused(error) for error in (call.exception() for call in calls) if error is not None]
    assert len(reasons) == 18
    assert all("tenant 'a' uses all of its share of 1MiB" in reason for reason in reasons)
    a.ingest(20, tokens=10_000)  # those that were refused take nothing of the share


def test_an_ingest_that_is_refused_leaves_the_epochs_to_the_workers(start: Any) -> None:
    _, a, _ = start(shares='shares = {store = "1MiB"}')
    stream, wire = a.stream(), a.wire

    def commit(session: int) -> int:
        """Returns the epoch of a response after so many weight changes."""
        stream.ask(
            opens=[wire.open(session, [session], "a-run")], step=wire.step([session], [[1, 2]]),
            closes=[wire.commit(session, 2, changes=session)],
        )  # fmt: skip
        request = pb.HistoryRequest(prompt=wire.i32([session]), namespace="a-run")
        return int(wire.stub.History(request, metadata=a.metadata).responses[0].epoch)

    assert commit(0) == 0
    request = a.request(9, tokens=300_000)
    request.epoch = 7
    with pytest.raises(grpc.RpcError, match="all of its share of 1MiB"):
        wire.stub.Ingest(request, metadata=a.metadata)
    assert commit(1) == 1
    stream.cancel()


def test_commits_of_one_message_do_not_exceed_a_share_of_the_store(start: Any) -> None:
    _, a, _ = start(shares='shares = {store = "1MiB"}')
    stream, wire = a.stream(), a.wire
    ids = list(range(1, 9))
    answer = stream.ask(
        opens=[wire.open(session, [session], "a-run") for session in ids],
        step=wire.step(ids, [range(50_000)] * len(ids), max_tokens=0),
        closes=[wire.commit(session, 50_000) for session in ids],
    )
    assert [refusal.session for refusal in answer.refusals] == [6, 7, 8]
    stream.cancel()


def test_bytes_that_wait_for_the_store_count_until_it_has_them_or_refuses_them(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(FILE.format(a=secret("a"), b=secret("b"), shares='shares = {store = "1MiB"}'))
    tenants = Tenants(Access(path), Engine(1 << 20))
    with tenants.reserve("a", 1 << 20) as reservation:
        assert "all of its share of 1MiB" in tenants.store_refusal("a", 1, StoreSize())
        reservation.settle(100)
        assert not tenants.store_refusal("a", (1 << 20) - 100, StoreSize())
    with tenants.reserve("a", 1 << 20):
        pass
    assert (tenants.stored["a"], tenants.waiting["a"]) == (100, 0)


def test_a_tenant_that_fills_the_index_evicts_its_own_history(start: Any) -> None:
    server, a, b = start("--memory", "64MiB", "--namespace-tokens", "0")
    for number in range(20):
        b.ingest(number, tokens=2000)
    held = server.metrics()['histospec_tenant_used{resource="index",tenant="b"}']
    assert held > 0
    for number in range(90):
        a.ingest(number, tokens=100_000)
    metrics = server.metrics()
    assert metrics['histospec_evicted_responses_total{namespace="a-run",reason="memory"}'] > 0
    assert metrics['histospec_evicted_responses_total{namespace="b-run",reason="memory"}'] == 0
    assert metrics['histospec_tenant_used{resource="index",tenant="b"}'] >= held
    assert metrics['histospec_tenant_used{resource="index",tenant="a"}'] > 0.7 * (64 << 20)


def test_a_tenant_with_many_sessions_leaves_memory_to_others(start: Any) -> None:
    """Also if it opens few on each of many streams."""
    _, a, b = start("--memory", "64MiB", "--namespace-tokens", "0")

    def open_(caller: Caller, number: int, sessions: int) -> tuple[Stream, list[str]]:
        stream, wire = caller.stream(), caller.wire
        prompts = [[number, session, *range(20_000)] for session in range(sessions)]
        opens = [wire.open(session, prompt, f"{caller.name}-run") for session, prompt in enumerate(prompts)]
        answer = stream.ask(opens=opens, step=wire.step([], []))
        return stream, [refusal.reason for refusal in answer.refusals]

    streams = [open_(b, 0, 1)[0]]
    reasons: list[str] = []
    while not reasons:
        stream, reasons = open_(a, len(streams), 2)
        streams.append(stream)
        assert len(streams) < 1000
    assert "half of --memory, and tenant 'a' more than its share" in reasons[0]
    stream, reasons = open_(b, 0, 8)
    assert reasons == []
    for each in (*streams, stream):
        each.cancel()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shares = {disk = 3}", "shares.unknown key; known are index, store, namespaces, sessions"),
        ("shares = {namespaces = -1}", "namespaces"),
        ('[[tenant]]\nname = "x"\n', "tenant.0.namespaces: Field required"),
        (
            '[[tenant]]\nname = "x"\nnamespaces = ["x"]\nsecret = "0123456789abcdef"',
            "known are name, namespaces, shares",
        ),
    ],
)
def test_a_wrong_share_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(FILE.format(a=secret("a"), b=secret("b"), shares="").rstrip() + "\n" + text)
    with pytest.raises(ConfigError, match=says) as caught:
        Access(path)
    assert "0123456789" not in str(caught.value)


def test_a_namespace_belongs_to_the_first_tenant_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(
        FILE.format(a=secret("a"), b=secret("b"), shares="")
        + f'[[token]]\nname = "any"\nsecret = "{secret("any")}"\n'
        + '[[tenant]]\nname = "team"\nnamespaces = ["a-team-*"]\n'
    )
    tenants = Tenants(Access(path), Engine(1 << 20))
    assert [tenants.owner(name, "any") for name in ("a-team-1", "a-1", "b-1", "c")] == ["team", "a", "b", "any"]
    assert tenants.owner("c") == ""
