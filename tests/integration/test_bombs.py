"""Small messages that decode to large ones: the server never reads those of strangers, and limits the others."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from histospec.specrl import rollout_cache_pb2 as specrl
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Peak, Server, Starter, secret, with_tokens
from tests.support.waiting import eventually
from tests.support.wires import i32

TOKEN = (("authorization", f"Bearer {secret('worker')}"),)
STRANGE = (("authorization", "Bearer no-such-token-0123456789"),)
SIZE = 62 << 20
ROOM_OF_A_STRANGER = 32 << 20  # less than half of the message: the server never receives it
ROOM = 5 * SIZE  # gRPC's copies of the message, decoded and passed on
DRAFTS, SPECRL = "histospec.v1.DraftService", "specrl.RolloutCacheService"
INGEST = pb.IngestRequest(namespace="run", prompt=i32([1])).SerializeToString()


def one_response() -> bytes:
    return specrl.UpdateCacheRequest(responses=[specrl.TokenList(tokens=[1] * SIZE)]).SerializeToString()


def negative_tokens() -> bytes:
    negative = pb.Response(tokens=i32([-5]) * (1 << 20))
    return pb.IngestRequest(namespace="run", prompt=i32([1]), responses=[negative] * 14).SerializeToString()


# By RPC: what makes the message, and what is wrong with it.
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    f"{DRAFTS}/Draft": (lambda: b"\x12\x00" * (SIZE // 2), "opens: 4097 are more than the limit of 4096"),
    f"{DRAFTS}/Ingest": (
        lambda: INGEST + b"\x22\x00" * (SIZE // 2),
        "responses: 4097 are more than the limit of 4096",
    ),
    f"{DRAFTS}/History": (
        lambda: INGEST + b"\x0a\x00" * (SIZE // 2),
        "fields: 65537 are more than the limit of 65536",
    ),
    f"{DRAFTS}/PredictLength": (lambda: INGEST + (b"\x29" + bytes(8)) * (SIZE // 9), "quantiles: 65 are more"),
    f"{DRAFTS}/PredictLengths": (
        lambda: b"\x12\x00" * (SIZE // 2),
        "problems: 4097 are more than the limit of 4096",
    ),
    f"{DRAFTS}/Topology": (lambda: b"\x08\x01" * (SIZE // 2), "fields: 65537 are more than the limit of 65536"),
    f"{DRAFTS}/DropNamespace": (lambda: b"\x0a\x00" * (SIZE // 2), "fields: 65537 are more than the limit of 65536"),
    f"{DRAFTS}/Rewind": (lambda: b"\x10\x00" * (SIZE // 2), "fields: 65537 are more than the limit of 65536"),
    f"{SPECRL}/UpdateCache": (one_response, "tokens are over the limit of 16777216"),
}


@pytest.fixture(scope="module")
def guarded(start_shared: Starter, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start_shared(*with_tokens(tmp_path_factory.mktemp("tokens"), worker={"rights": ["read", "write", "admin"]}))


def sent(endpoint: str, method: str, body: bytes, metadata: Any) -> grpc.RpcError:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    kwargs: dict[str, Any] = {"metadata": metadata, "compression": grpc.Compression.Gzip, "timeout": 60}
    channel: Any  # of bytes, which the stubs do not know
    with grpc.insecure_channel(endpoint, options=options) as channel:
        if method.endswith("/Draft"):
            call = channel.stream_stream(f"/{method}")(iter([body]), **kwargs)
        else:
            call = channel.stream_unary(f"/{method}").future(iter([body]), **kwargs)
        with pytest.raises(grpc.RpcError) as caught:
            list(call) if method.endswith("/Draft") else call.result()
    return caught.value


@pytest.mark.parametrize("method", BOMBS)
def test_what_a_stranger_sends_is_never_read(guarded: Server, method: str) -> None:
    body = BOMBS[method][0]()
    peak = Peak(guarded.pid)
    errors = [sent(guarded.endpoint, method, body, metadata) for metadata in (None, STRANGE)]
    assert peak.grown() < ROOM_OF_A_STRANGER
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAUTHENTICATED}
    counted = f'histospec_rpc_errors_total{{code="UNAUTHENTICATED",method="{method.partition("/")[2]}"}}'
    eventually(lambda: guarded.metrics()[counted] == 2, "the refusals are not counted")


@pytest.mark.parametrize("method", BOMBS)
def test_what_a_message_becomes_is_bounded_for_everybody(guarded: Server, method: str) -> None:
    make_body, words = BOMBS[method]
    body = make_body()
    peak = Peak(guarded.pid)
    error = sent(guarded.endpoint, method, body, TOKEN)
    assert peak.grown() < ROOM
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert words in str(error.details())
    assert guarded.running


@pytest.mark.parametrize(
    ("make_body", "words"),
    [(BOMBS[f"{DRAFTS}/Ingest"][0], "responses: 4097 are more"), (negative_tokens, "is negative")],
    ids=["not decoded", "decoded"],
)
def test_a_refused_message_is_given_back(guarded: Server, make_body: Callable[[], bytes], words: str) -> None:
    body = make_body()

    def refuse() -> None:
        assert words in str(sent(guarded.endpoint, f"{DRAFTS}/Ingest", body, TOKEN).details())

    refuse()
    peak = Peak(guarded.pid)
    for _ in range(6):
        refuse()
    assert peak.grown() < 3 * SIZE  # gRPC's copies of one; six that stayed would be 6 * SIZE
