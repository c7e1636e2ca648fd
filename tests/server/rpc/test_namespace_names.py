"""Names that begin or end with white space: no new ones are created, and stored ones remain usable."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from histospec.native import Engine
from histospec.protocol.names import white_space
from histospec.server import cli
from histospec.server.errors import ConfigError, InvalidRequest
from histospec.server.history.namespaces import Namespaces
from histospec.server.history.tenants import Tenants
from histospec.server.security.access import Access
from histospec.server.settings import options
from histospec.server.settings.addresses import ShardAddress
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb
from tests.support.batches import put
from tests.support.contents import on_disk, tokens
from tests.support.servers import Server, Starter, secret, with_tokens
from tests.support.wires import Connector

SENTENCE = "namespace: 'new ' begins or ends with white space; give 'new'"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("run", ""),
        ("a run", ""),
        ("", ""),
        ("run ", "'run ' begins or ends with white space; give 'run'"),
        ("\trun", r"'\trun' begins or ends with white space; give 'run'"),
        ("run\n", r"'run\n' begins or ends with white space; give 'run'"),
        ("run\u00a0", r"'run\xa0' begins or ends with white space; give 'run'"),
        ("  ", "'  ' is white space alone"),
    ],
)
def test_white_space_is_shown(name: str, wrong: str) -> None:
    assert white_space(name) == wrong


def test_a_name_that_is_stored_stays_until_it_is_dropped() -> None:
    names = Namespaces(8, Tenants(Access(None), Engine(1 << 20)))
    names.know(["old "])
    names.admit("old ")
    with pytest.raises(InvalidRequest, match="'new ' begins or ends with white space"):
        names.admit("new ")
    names.forget("old ")
    with pytest.raises(InvalidRequest, match="'old ' begins or ends with white space"):
        names.admit("old ")


@pytest.fixture
def server(start_server: Starter, tmp_path: Path) -> Server:
    """Returns a server whose store has a namespace "old " from before the rule."""
    store = on_disk(tmp_path, "server-0")
    put(store, tokens(2, 3, 4), 1, prompt=tokens(1), namespace="old ")
    store.close()
    return start_server()


def test_no_rpc_makes_such_a_namespace(server: Server, connect: Connector) -> None:
    wire = connect(server.endpoint)
    with pytest.raises(grpc.RpcError) as caught:
        wire.ingest([1], [[2, 3]], namespace="new ")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == SENTENCE
    stream = wire.stream()
    opens = [wire.open(1, [1], namespace="new "), wire.open(2, [1], namespace="run")]
    answer = stream.ask(opens=opens, step=wire.step([1, 2], [[5], [6]]))
    assert [(r.session, r.reason) for r in answer.refusals] == [(1, SENTENCE)]
    answer = stream.ask(step=wire.step([2], [[7]], [1]))  # the stream continues
    assert not answer.refusals
    assert "new " not in server.get("/status")[1]


def test_what_is_stored_under_one_can_be_read_and_rewound_and_dropped(
    server: Server, connect: Connector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = connect(server.endpoint)
    assert wire.history([1], namespace="old ") == [[2, 3, 4]]
    wire.ingest([1], [[2, 9]], epoch=2, namespace="old ")  # a running run loses nothing
    answer = wire.stream().ask(opens=[wire.open(1, [1], namespace="old ")], step=wire.step([1], [[2, 3]]))
    assert wire.drafts(answer) == [[4]]
    file = tmp_path / "snapshot.jsonl"
    assert cli.main(["snapshot", str(file), "--data-dir", str(server.data_dir)]) == 0
    assert {json.loads(line)["namespace"] for line in file.read_text().splitlines()} == {"old "}
    assert wire.stub.Inspect(pb.InspectRequest(namespace="old ")).facts.responses == 2
    assert wire.stub.Rewind(pb.RewindRequest(namespace="old ", epoch=1)).responses == 1
    assert wire.stub.DropNamespace(pb.DropNamespaceRequest(namespace="old ")).responses == 1
    with pytest.raises(grpc.RpcError, match="'old ' begins or ends with white space; give 'old'"):
        wire.ingest([1], [[2, 3]], namespace="old ")


@pytest.mark.parametrize("flag", ["--shard-name", "--specrl-namespace"])
def test_options_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: 'a ' begins or ends with white space; give 'a'$"):
        options.settle(Config, {flag[2:].replace("-", "_"): "a "})
    assert options.settle(Config, {"specrl_namespace": "", "shard_name": "a"}).specrl_namespace == ""


def test_a_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="the shard name 'a ' begins or ends with white space; give 'a'"):
        ShardAddress.parse("a =h:1")
    assert ShardAddress.parse(" a=h:1 ").name == "a"


def test_a_name_that_is_too_long_is_refused_before_it_is_quoted(
    start_server: Starter, connect: Connector, tmp_path: Path
) -> None:
    """A caller without a right to it would otherwise put it into the log and on the status page."""
    server = start_server(*with_tokens(tmp_path, team={"namespaces": ["team-*"], "rights": ["read", "write", "admin"]}))
    stub, metadata = connect(server.endpoint).stub, (("authorization", f"Bearer {secret('team')}"),)
    name = "://" * 5000
    requests: list[tuple[Any, Any]] = [
        (stub.Ingest, pb.IngestRequest(namespace=name)),
        (stub.History, pb.HistoryRequest(namespace=name)),
        (stub.PredictLength, pb.PredictLengthRequest(namespace=name)),
        (stub.PredictLengths, pb.PredictLengthsRequest(namespace=name)),
        (stub.DropNamespace, pb.DropNamespaceRequest(namespace=name)),
        (stub.Rewind, pb.RewindRequest(namespace=name)),
        (stub.Import, pb.ImportRequest(namespace=name)),
        (lambda *args, **options: list(stub.Export(*args, **options)), pb.ExportRequest(namespaces=name)),
    ]
    for call, request in requests:
        with pytest.raises(grpc.RpcError, match=r"namespaces?: 15000 characters are more than the limit") as error:
            call(request, metadata=metadata)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "://" * 100 not in server.get("/status")[1]
