"""Inspect: what it says about a namespace, to which callers, and without side effects."""

from pathlib import Path

import grpc
import pytest

from histospec.client import DraftClient, Inspection, PermissionDenied, Response, SharedPrompts
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server, Starter
from tests.support.wires import Wire

TOKENS = """
[[token]]
name = "operator"
secret = "operator-secret-0123456789"

[[token]]
name = "one run"
secret = "one-run-secret-0123456789"
namespaces = ["run-1"]
rights = ["read"]
"""


def ask(server: Server, namespace: str, who: str = "operator") -> Inspection:
    token = f"{who}-secret-0123456789"
    with DraftClient(server.endpoint, namespace, token=token, deadline=60.0) as client:
        return client.inspect(60.0)[0]


def fill(server: Server, namespace: str, prompts: range) -> None:
    with DraftClient(server.endpoint, namespace, token="operator-secret-0123456789", deadline=60.0) as client:
        for prompt in prompts:
            client.ingest([1, prompt], [Response([5, 6])], epoch=3)


@pytest.fixture
def guarded(start_server: Starter, tmp_path: Path) -> Server:
    (tmp_path / "tokens.toml").write_text(TOKENS)
    return start_server("--tokens", str(tmp_path / "tokens.toml"), name="guarded")


def test_namespaces_that_share_prompts_the_most_first(server: Server) -> None:
    for number, prompts in enumerate((range(10), range(6), range(2), range(90, 95))):
        fill(server, f"day-{number}", prompts)
    told = ask(server, "day-0")
    assert told.shared == (SharedPrompts("day-1", 6, 10), SharedPrompts("day-2", 2, 10))
    assert ask(server, "day-3").shared == ()
    assert ask(server, "absent").shared == ()
    assert told.namespace is not None
    assert (told.namespace.problems, told.namespace.responses, told.namespace.newest_epoch) == (10, 10, 3)


def test_at_most_eight_of_them(server: Server) -> None:
    for number in range(12):
        fill(server, f"day-{number:02}", range(3))
    assert [shared.namespace for shared in ask(server, "day-11").shared] == [f"day-{n:02}" for n in range(8)]


def test_only_what_the_caller_may_read(guarded: Server) -> None:
    for namespace in ("run-1", "run-2"):
        fill(guarded, namespace, range(3))
    assert ask(guarded, "run-1").shared == (SharedPrompts("run-2", 3, 3),)
    assert ask(guarded, "run-1").similar == ("run-2",)
    bound = ask(guarded, "run-1", "one-run")
    assert bound.rights == ("read",)
    assert (bound.shared, bound.similar) == ((), ())
    assert bound.namespace is not None
    strange = ask(guarded, "run-2", "one-run")
    assert (strange.rights, strange.namespace, strange.shared, strange.similar) == ((), None, (), ("run-1",))
    with pytest.raises(PermissionDenied):
        ask(guarded, "run-1", "stranger")


def test_a_store_that_is_gone_is_said_to_who_may_write(guarded: Server, tmp_path: Path) -> None:
    fill(guarded, "run-1", range(2))
    assert ask(guarded, "run-1").trouble == ""
    (tmp_path / "guarded").rename(tmp_path / "moved")
    assert ask(guarded, "run-1").trouble.startswith("store: ")
    assert ask(guarded, "run-1", "one-run").trouble == ""


def test_a_namespace_that_is_asked_about_is_not_made(server: Server) -> None:
    assert ask(server, "absent").namespace is None
    assert ask(server, "absent").namespace is None
    assert not [name for name in server.metrics() if "absent" in name]


def test_a_namespace_that_cannot_be_one(wire: Wire) -> None:
    for name, sentence in (("", "namespace: must not be empty"), ("x" * 129, "namespace: 129 characters are more")):
        with pytest.raises(grpc.RpcError, match=sentence):
            wire.stub.Inspect(pb.InspectRequest(namespace=name), timeout=60)
