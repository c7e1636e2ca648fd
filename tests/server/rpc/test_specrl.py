"""SpecRL's updater, unchanged: the server drafts from, stores and checks what it sends like other data."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from histospec.client import DraftClient
from histospec.server.errors import InvalidRequest, LimitExceeded
from histospec.server.rpc.specrl import PAUSE_SECONDS, tokens_of
from histospec.specrl import rollout_cache_pb2 as specrl_pb2
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server, Starter, secret, with_tokens
from tests.support.specrl_updater import Updater, hash_of
from tests.support.wires import Connector, Wire

SERVICE = "specrl.RolloutCacheService"
PROMPT = [11, 12, 13]
RESPONSE = list(range(100, 140))


@pytest.fixture
def updater(wire: Wire) -> Updater:
    return Updater(wire.channel)


@pytest.fixture(scope="module")
def limited(start_shared: Starter) -> Server:
    """Returns a server with small limits; tests must leave it empty."""
    limits = ("--max-prompt-tokens", "20", "--max-session-tokens", "50", "--max-batch", "8", "--max-message", "10KiB")
    return start_shared(*limits)


def epochs(wire: Wire, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Returns the stored responses, oldest first."""
    answer = wire.stub.History(pb.HistoryRequest(namespace="specrl", prompt=wire.i32(prompt)))
    return [response.epoch for response in answer.responses]


def pause() -> None:
    """Ends a burst."""
    time.sleep(1.1 * PAUSE_SECONDS)


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, str(caught.value.details())


def test_the_hash_is_that_of_the_xxhash_library() -> None:
    assert hash_of([]) == 0xEF46DB3751D8E999  # from the specification of XXH64
    assert hash_of([1, 2, 3]) == 0xB5148CB100A911FC


def test_what_it_sends_is_drafted_from(server: Server, updater: Updater) -> None:
    assert updater.burst([(PROMPT, [RESPONSE, RESPONSE[:5]]), ([7], [[8, 9]])]) == []
    with DraftClient(server.endpoint, namespace="specrl", deadline=60) as client:
        (session,) = client.open([PROMPT])
        (draft,) = client.step([session], [RESPONSE[:6]], max_tokens=8, verify_cost=0.0)
        assert draft.tokens.tolist() == RESPONSE[6:14]
        assert [list(response.tokens) for response in client.history(PROMPT)] == [RESPONSE, RESPONSE[:5]]
    metrics = server.metrics()
    assert metrics["histospec_ingested_responses_total"] == 3
    assert metrics["histospec_ingested_tokens_total"] == len(RESPONSE) + 5 + 2
    assert metrics['histospec_rpc_seconds_count{method="UpdateCache"}'] == 2
    lines = server.logged("ingested", 2)
    assert sorted((line["namespace"], line["responses"]) for line in lines) == [("specrl", 1), ("specrl", 2)]


def test_what_was_a_success_survives_a_crash(server: Server, wire: Wire, updater: Updater) -> None:
    assert updater.update(PROMPT, [RESPONSE])
    server.kill()
    server.start()
    assert wire.history(PROMPT, "specrl", wait=True) == [RESPONSE]


def test_a_prompt_that_comes_again_begins_the_next_epoch(start_server: Starter, connect: Connector) -> None:
    wire = connect(start_server("--history-epochs", "2").endpoint)
    updater = Updater(wire.channel)
    for step in range(4):
        pause()
        assert updater.burst([([prompt], [[step, prompt, i] for i in range(2)]) for prompt in range(1, 9)]) == []
    for prompt in range(1, 9):  # the newest two of four
        assert epochs(wire, [prompt]) == [2, 2, 3, 3]
    assert wire.history([5], "specrl", limit=1) == [[3, 5, 1]]


def test_copies_of_a_prompt_in_one_burst_are_one_epoch(server: Server, wire: Wire, updater: Updater) -> None:
    """Such as a validation set that holds each problem 30 times."""
    for step in range(2):
        pause()
        copies = [([prompt], [[step, prompt, copy]]) for copy in range(30) for prompt in range(1, 9)]
        assert updater.burst(copies) == []
    for prompt in range(1, 9):
        assert epochs(wire, [prompt]) == [0] * 30 + [1] * 30


def test_an_empty_response_costs_no_other(server: Server, wire: Wire, updater: Updater) -> None:
    assert updater.burst([(PROMPT, [RESPONSE, [], RESPONSE[:5], []]), ([7], [[]])]) == []
    assert wire.history(PROMPT, "specrl") == [RESPONSE, RESPONSE[:5]]
    assert wire.history([7], "specrl") == []
    lines = server.logged("empty responses left out", 2)
    assert sorted((line["level"], line["empty"], line["others"]) for line in lines) == [
        ("warning", 1, 0),
        ("warning", 2, 2),
    ]


def test_who_counts_epochs_is_followed(wire: Wire, updater: Updater) -> None:
    updater.update(PROMPT, [[1]])
    wire.ingest([9], [[9]], "specrl", epoch=40)
    updater.update(PROMPT, [[2]])
    updater.update([8], [[8]])
    pause()
    updater.update(PROMPT, [[3]])
    wire.stub.Rewind(pb.RewindRequest(namespace="specrl", epoch=40))
    updater.update(PROMPT, [[4]])
    assert epochs(wire) == [0, 40, 40]
    assert epochs(wire, [8]) == [40]


@pytest.mark.parametrize(
    ("prompt", "responses", "prompt_hash", "code", "said"),
    [
        (PROMPT, [RESPONSE], 5, "INVALID_ARGUMENT", "prompt_hash: 5 is not the XXH64 of the prompt's 3 tokens"),
        (PROMPT[::-1], [RESPONSE], hash_of(PROMPT), "INVALID_ARGUMENT", "prompt_hash: "),
        ([], [RESPONSE], None, "INVALID_ARGUMENT", "prompt: must not be empty"),
        (PROMPT, [], None, "INVALID_ARGUMENT", "responses: must not be empty"),
        ([1, -1], [RESPONSE], None, "INVALID_ARGUMENT", "prompt: token -1 at position 1 is negative"),
        (PROMPT, [[1, 2, -7]], None, "INVALID_ARGUMENT", "responses[0].tokens: token -7 at position 2 is negative"),
        (PROMPT, [[], [1], [-7]], None, "INVALID_ARGUMENT", "responses[2].tokens: token -7 at position 0 is negative"),
        ([1] * 21, [RESPONSE], None, "RESOURCE_EXHAUSTED", "prompt: 21 tokens are more than the limit of 20"),
        (PROMPT, [[1], [1] * 51], None, "RESOURCE_EXHAUSTED", "responses[1].tokens: 51 tokens are more than the limit"),
        (PROMPT, [[1]] * 9, None, "RESOURCE_EXHAUSTED", "responses: 9 are more than the limit of 8"),
        (PROMPT, [[1 << 30] * 300] * 8, None, "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_stored(
    limited: Server,
    connect: Connector,
    prompt: list[int],
    responses: list[list[int]],
    prompt_hash: int | None,
    code: str,
    said: str,
) -> None:
    wire = connect(limited.endpoint)
    got, words = refused(lambda: Updater(wire.channel).update(prompt, responses, prompt_hash))
    assert (got, said in words) == (code, True), words
    assert limited.metrics()["histospec_ingested_responses_total"] == 0
    assert wire.history(PROMPT, "specrl") == []


def test_bytes_that_are_no_message_are_refused(wire: Wire) -> None:
    call = wire.channel.unary_unary(f"/{SERVICE}/UpdateCache", bytes, bytes)
    assert refused(lambda: call(b"\xff\xff")) == (
        "INVALID_ARGUMENT",
        "message: its 2 bytes are not a UpdateCacheRequest",
    )
    none = wire.channel.stream_unary(f"/{SERVICE}/UpdateCache", bytes, bytes)
    assert refused(lambda: none(iter(()))) == ("INVALID_ARGUMENT", "message: is missing")


def test_only_who_may_write_there_is_served(start_server: Starter, connect: Connector, tmp_path: Path) -> None:
    tokens = with_tokens(tmp_path, run={"namespaces": ["run*"]}, specrl={"namespaces": ["specrl*"]})
    server = start_server(*tokens, "--specrl-namespace", "specrl-7")
    updater = Updater(connect(server.endpoint).channel)
    code, words = refused(lambda: updater.update(PROMPT, [RESPONSE]))
    assert (code, "SpecRL's updater cannot send one: send to a server without --tokens" in words) == (
        "UNAUTHENTICATED",
        True,
    ), words
    assert "HISTOSPEC_TOKEN" not in words  # which the updater does not read
    stranger = [("authorization", f"Bearer {secret('run')}")]
    code, words = refused(lambda: updater.update(PROMPT, [RESPONSE], metadata=stranger))
    assert (code, "no right to write in namespace 'specrl-7'" in words) == ("PERMISSION_DENIED", True)
    assert updater.update(PROMPT, [RESPONSE], metadata=[("authorization", f"Bearer {secret('specrl')}")])
    with DraftClient(server.endpoint, namespace="specrl-7", token=secret("specrl")) as client:
        assert [np.asarray(r.tokens).tolist() for r in client.history(PROMPT)] == [RESPONSE]
    assert server.metrics()['histospec_rpc_errors_total{code="UNAUTHENTICATED",method="UpdateCache"}'] == 1


def test_it_is_listed_and_healthy(wire: Wire) -> None:
    database = ProtoReflectionDescriptorDatabase(wire.channel)
    assert SERVICE in database.get_services()
    (method,) = DescriptorPool(database).FindServiceByName(SERVICE).methods
    assert (method.name, method.input_type.full_name) == ("UpdateCache", "specrl.UpdateCacheRequest")
    answer = health_pb2_grpc.HealthStub(wire.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_without_a_namespace_it_is_not_there(start_server: Starter, connect: Connector) -> None:
    wire = connect(start_server("--specrl-namespace", "").endpoint)
    assert refused(lambda: Updater(wire.channel).update(PROMPT, [RESPONSE]))[0] == "UNIMPLEMENTED"
    assert SERVICE not in ProtoReflectionDescriptorDatabase(wire.channel).get_services()
    assert wire.history(PROMPT, "specrl") == []


@pytest.mark.parametrize("most", [1, 127, 128, 1 << 14, 2**31])
def test_lists_are_decoded_as_protobuf_does(most: int) -> None:
    """Numbers of one to five bytes, ten for negative ones, in several pieces."""
    numbers = np.random.default_rng(most).integers(-most // 2, most, 50_000, dtype=np.int64).clip(-(2**31), 2**31 - 1)
    for tokens in (numbers, np.abs(numbers), numbers[:0], numbers[:1]):
        part = specrl_pb2.TokenList(tokens=tokens.tolist()).SerializeToString()
        assert asyncio.run(tokens_of("prompt", part, 50_000)) == tokens.astype("<i4").tobytes()
    unpacked = b"\x08\x05" * 20
    assert asyncio.run(tokens_of("prompt", unpacked, 20)) == np.full(20, 5, "<i4").tobytes()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (b"\x0a\x02\x80\x80", "the last token is incomplete"),
        (b"\x0a\x0c" + b"\xff" * 11 + b"\x01", "a token is longer than 10 bytes"),
        (b"\x0a\x09\x01", "its 3 bytes are not a TokenList"),
        (b"\x08\x05" * (1 << 16), "are not one packed field"),
    ],
)
def test_lists_that_make_no_sense_are_refused(part: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt: .*{words}"):
        asyncio.run(tokens_of("prompt", part, 50_000))


def test_long_lists_are_refused_before_they_are_decoded() -> None:
    part = specrl_pb2.TokenList(tokens=[1] * 21).SerializeToString()
    with pytest.raises(LimitExceeded, match="prompt: 21 tokens are more than the limit of 20"):
        asyncio.run(tokens_of("prompt", part, 20))
