"""Malformed and oversized requests: a clear status, nothing applied, no other caller affected."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.server.errors import InvalidRequest, LimitExceeded
from histospec.server.rpc import wire as checks
from histospec.server.settings.config import Config
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server
from tests.support.wires import Connector

NAN = np.float32("nan").tobytes()
INVALID = grpc.StatusCode.INVALID_ARGUMENT
TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def u64(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def step(**fields: Any) -> dict[str, pb.Step]:
    """Returns a step of the open session 1, valid except for `fields`."""
    right: dict[str, Any] = {
        "sessions": u64(1),
        "positions": i32(1),
        "lengths": i32(2),
        "tokens": i32(5, 6),
        "max_tokens": 4,
    }
    return {"step": pb.Step(**(right | fields))}


def opening(**fields: Any) -> dict[str, list[pb.OpenSession]]:
    """Returns an open that is valid except for `fields`."""
    right: dict[str, Any] = {"session": 2, "namespace": "run", "prompt": i32(1)}
    return {"opens": [pb.OpenSession(**(right | fields))]}


def closing(**fields: Any) -> dict[str, list[pb.CloseSession]]:
    """Returns a commit of session 1 that is valid except for `fields`."""
    return {"closes": [pb.CloseSession(**({"session": 1, "commit": True, "generated": 1} | fields))]}


def aborted(**fields: Any) -> dict[str, Any]:
    good: dict[str, Any] = {"namespace": "run", "prompt": 1, "anchor": 2, "digest": bytes(16), "tail": i32(7)}
    return {"closes": [pb.CloseSession(session=1, aborted=pb.AbortedResponse(**good | fields))]}


MESSAGES = {
    "sessions not whole": (step(sessions=b"1234567"), INVALID, "step.sessions: 7 bytes"),
    "positions not whole": (step(positions=b"123"), INVALID, "step.positions: 3 bytes"),
    "lengths not whole": (step(lengths=b"12345"), INVALID, "step.lengths: 5 bytes"),
    "tokens not whole": (step(tokens=b"1234567"), INVALID, "step.tokens: 7 bytes"),
    "too few positions": (step(positions=b""), INVALID, "step.positions: 0 values for 1 sessions"),
    "too many lengths": (step(lengths=i32(1, 1)), INVALID, "step.lengths: 2 values for 1 sessions"),
    "wrong sum": (step(lengths=i32(3)), INVALID, "sum to 3, but step.tokens has 2"),
    "negative length": (step(lengths=i32(-2)), INVALID, "step.lengths: -2 at position 0"),
    "huge lengths": (
        step(sessions=u64(1, 2, 3), positions=i32(1, 0, 0), lengths=i32(*[2**31 - 1] * 3)),
        INVALID,
        "sum to 6442450941",
    ),
    "negative position": (step(positions=i32(-1)), INVALID, "step.positions: -1 at position 0"),
    "negative token": (step(tokens=i32(5, -6)), INVALID, "step.tokens: token -6 at position 1"),
    "session twice": (
        step(sessions=u64(1, 1), positions=i32(1, 1), lengths=i32(1, 1)),
        INVALID,
        "step.sessions: a session appears twice",
    ),
    "cost not a number": (step(verify_cost=float("nan")), INVALID, "step.verify_cost: nan"),
    "more late than there were": (step(late=2**32 - 1), INVALID, "step.late: 4294967295 are more than the"),
    "too few verified": (step(verified=i32(1, 2)), INVALID, "step.verified: 2 values for 1 sessions"),
    "verified not whole": (step(verified=b"12345"), INVALID, "step.verified: 5 bytes"),
    "negative verified": (step(verified=i32(-1)), INVALID, "step.verified: -1 at position 0"),
    "too many verified": (
        step(verified=i32(1025)),
        INVALID,
        "step.verified[0]: is 1025, must lie in [0, 1024]",
    ),
    "model without verified": (
        step(model_drafted=i32(1), model_accepted=i32(1)),
        INVALID,
        "step.verified: has 0 entries, must have 1",
    ),
    "half of the model": (
        step(verified=i32(0), model_drafted=i32(1)),
        INVALID,
        "step.model_accepted: has 0 entries, must have 1",
    ),
    "negative model": (
        step(verified=i32(0), model_drafted=i32(-1), model_accepted=i32(0)),
        INVALID,
        "step.model_drafted: -1 at position 0",
    ),
    "more accepted than drafted": (
        step(verified=i32(0), model_drafted=i32(1), model_accepted=i32(2)),
        INVALID,
        "step.model_accepted[0]: is 2, more than model_drafted[0], 1",
    ),
    "negative cost": (step(verify_cost=-1.0), INVALID, "step.verify_cost: -1.0"),
    "draft too long": (step(max_tokens=257), TOO_MUCH, "step.max_tokens: 257 is over the limit of 256"),
    "batch too large": (
        step(sessions=u64(*range(4097))),
        TOO_MUCH,
        "step.sessions: 4097 are more than the limit of 4096",
    ),
    "no namespace": (opening(namespace=""), INVALID, "opens[0].namespace: must not be empty"),
    "long namespace": (opening(namespace="x" * 129), INVALID, "opens[0].namespace: 129 characters"),
    "long problem": (opening(problem="x" * 1025), INVALID, "opens[0].problem: 1025 characters"),
    "no prompt": (opening(prompt=b""), INVALID, "opens[0].prompt: must not be empty"),
    "prompt not whole": (opening(prompt=b"12345"), INVALID, "opens[0].prompt: 5 bytes"),
    "negative prompt": (opening(prompt=i32(-1)), INVALID, "opens[0].prompt: token -1"),
    "generated not whole": (opening(generated=b"1"), INVALID, "opens[0].generated: 1 bytes"),
    "opened already": (opening(session=1), INVALID, "opens[0].session: 1 is already open"),
    "opened twice": (
        {"opens": [pb.OpenSession(session=9, namespace="run", prompt=i32(1))] * 2},
        INVALID,
        "opens: a session appears twice",
    ),
    "too many opens": (
        {"opens": [pb.OpenSession()] * 4097},
        TOO_MUCH,
        "opens: 4097 are more than the limit of 4096",
    ),
    "too many closes": (
        {"closes": [pb.CloseSession()] * 4097},
        TOO_MUCH,
        "closes: 4097 are more than the limit of 4096",
    ),
    "closed twice": ({"closes": [pb.CloseSession(session=1)] * 2}, INVALID, "closes: a session appears twice"),
    "negative epoch": (closing(epoch=-1), INVALID, "closes[0].epoch: -1 is negative"),
    "reward not a number": (closing(reward=float("nan")), INVALID, "closes[0].reward: nan"),
    "logprobs not whole": (closing(logprobs=b"12345"), INVALID, "closes[0].logprobs: 5 bytes"),
    "too many logprobs": (closing(logprobs=b"\0" * 8), INVALID, "closes[0].logprobs: 2 values for 1 tokens"),
    "logprobs of no number": (closing(logprobs=NAN), INVALID, "closes[0].logprobs: value 0 is not a number"),
    "alternatives too short": (closing(alternatives=b"\1"), INVALID, "closes[0].alternatives: 1 bytes, but its counts"),
    "alternatives too long": (closing(alternatives=b"\0" * 9), INVALID, "closes[0].alternatives: 9 bytes, but its"),
    "alternatives of no token": (
        closing(alternatives=b"\4" + bytes(5)),
        INVALID,
        "closes[0].alternatives: a place behind the 1 tokens",
    ),
    "aborted without a namespace": (aborted(namespace=""), INVALID, "closes[0].aborted.namespace: must not be empty"),
    "aborted without a prompt": (aborted(prompt=0), INVALID, "closes[0].aborted.anchor: 2 must be at least"),
    "aborted before its prompt": (aborted(anchor=0), INVALID, "closes[0].aborted.anchor: 0 must be at least"),
    "aborted, short digest": (aborted(digest=b"1"), INVALID, "closes[0].aborted.digest: 1 bytes, must be 16"),
    "aborted, no tokens": (aborted(tail=b""), INVALID, "closes[0].aborted.tail: 0 tokens, must be 1 to 128"),
    "aborted, many tokens": (aborted(tail=i32(*range(129))), INVALID, "closes[0].aborted.tail: 129 tokens"),
    "aborted, negative token": (aborted(tail=i32(-1)), INVALID, "closes[0].aborted.tail: token -1"),
    "good step, bad close": ({**step(), **closing(epoch=-1)}, INVALID, "closes[0].epoch"),
    "good open, bad step": ({**opening(), **step(lengths=i32(9))}, INVALID, "step.lengths"),
}


BYSTANDERS = 'histospec_generated_tokens_total{namespace="bystander"}'


@pytest.fixture(scope="module")
def bystander(shared_server: Server, connect_shared: Connector) -> Callable[[], None]:
    """A stream that stays open all the while, with one session."""
    wire = connect_shared(shared_server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1, namespace="bystander")], step=wire.step([1], [[1]]))
    generated = [1]

    def check() -> None:
        answer = stream.ask(step=wire.step([1], [[2]], [len(generated)]))
        generated.append(2)
        assert wire.unknown(answer) == []

    return check


@pytest.mark.parametrize(("message", "code", "text"), MESSAGES.values(), ids=MESSAGES.keys())
def test_a_malformed_message_ends_its_stream_alone(
    shared_server: Server,
    connect: Connector,
    bystander: Callable[[], None],
    message: dict[str, Any],
    code: grpc.StatusCode,
    text: str,
) -> None:
    wire = connect(shared_server.endpoint)
    stream = wire.stream()
    stream.ask(opens=[wire.open(1)], step=wire.step([1], [[5]]))
    before = engine_counters(shared_server)
    stream.send(**message)
    error = stream.error()
    assert error.code() is code
    assert text in str(error.details())
    assert len(str(error.details())) < 200
    bystander()
    # Nothing of the message was applied: the counters only have the bystander's step.
    after = engine_counters(shared_server)
    assert after.pop(BYSTANDERS) == before.pop(BYSTANDERS) + 1
    assert after == before
    assert wire.history([1, 2, 3]) == []


def engine_counters(server: Server) -> dict[str, float]:
    names = ("histospec_problem_lookups_total", "histospec_generated_tokens_total", "histospec_ingested")
    samples = server.metrics().items()
    return {name: value for name, value in samples if name.startswith(names)}


RESPONSE = {"tokens": i32(1, 2)}


def ingest(**fields: Any) -> Callable[..., object]:
    request = pb.IngestRequest(**({"namespace": "run", "prompt": i32(1), "responses": [RESPONSE]} | fields))
    return lambda stub: stub.Ingest(request)


UNARY = {
    "no namespace": (ingest(namespace=""), INVALID, "namespace: must not be empty"),
    "no prompt": (ingest(prompt=b""), INVALID, "prompt: must not be empty"),
    "prompt not whole": (ingest(prompt=b"12345"), INVALID, "prompt: 5 bytes"),
    "negative epoch": (ingest(epoch=-5), INVALID, "epoch: -5 is negative"),
    "empty response": (ingest(responses=[RESPONSE, {}]), INVALID, "responses[1].tokens: must not be empty"),
    "negative token": (ingest(responses=[{"tokens": i32(7, -7)}]), INVALID, "responses[0].tokens: token -7"),
    "logprobs": (ingest(responses=[RESPONSE | {"logprobs": b"\0" * 4}]), INVALID, "responses[0].logprobs: 1 values"),
    "logprobs of no number": (
        ingest(responses=[RESPONSE | {"logprobs": bytes(4) + NAN}]),
        INVALID,
        "responses[0].logprobs: value 1 is not a number",
    ),
    "mask": (ingest(responses=[RESPONSE | {"generated": b"\1"}]), INVALID, "responses[0].generated: 1 values for 2"),
    "mask value": (ingest(responses=[RESPONSE | {"generated": b"\1\2"}]), INVALID, "each value must be 0 or 1"),
    "reward": (ingest(responses=[RESPONSE | {"reward": float("inf")}]), INVALID, "responses[0].reward: inf"),
    "history": (lambda stub: stub.History(pb.HistoryRequest(namespace="run")), INVALID, "prompt: must not be empty"),
    "quantile": (
        lambda stub: stub.PredictLength(pb.PredictLengthRequest(namespace="run", prompt=i32(1), quantiles=[1.5])),
        INVALID,
        "quantiles: 1.5 must be from 0 to 1",
    ),
    "quantiles": (
        lambda stub: stub.PredictLength(pb.PredictLengthRequest(namespace="run", prompt=i32(1), quantiles=[0.5] * 65)),
        TOO_MUCH,
        "quantiles: 65 are more",
    ),
    "lengths": (
        lambda stub: stub.PredictLengths(
            pb.PredictLengthsRequest(
                namespace="run", problems=[pb.ExpectedResponse(prompt=i32(1)), pb.ExpectedResponse()]
            )
        ),
        INVALID,
        "problems[1].prompt: must not be empty",
    ),
    "too many lengths": (
        lambda stub: stub.PredictLengths(
            pb.PredictLengthsRequest(namespace="run", problems=[pb.ExpectedResponse(prompt=i32(1))] * 4097)
        ),
        TOO_MUCH,
        "problems: 4097 are more than the limit of 4096",
    ),
    "quantiles of lengths": (
        lambda stub: stub.PredictLengths(pb.PredictLengthsRequest(namespace="run", quantiles=[float("nan")])),
        INVALID,
        "quantiles: nan must be from 0 to 1",
    ),
    "drop": (lambda stub: stub.DropNamespace(pb.DropNamespaceRequest()), INVALID, "namespace: must not be empty"),
    "too many responses": (ingest(responses=[RESPONSE] * 4097), TOO_MUCH, "responses: 4097 are more than the limit"),
    "message too long": (
        ingest(responses=[{"tokens": bytes(65 << 20)}]),
        TOO_MUCH,
        "larger than max",
    ),
}


@pytest.mark.parametrize(("call", "code", "text"), UNARY.values(), ids=UNARY.keys())
def test_a_malformed_request_is_refused_whole(
    shared_server: Server,
    connect: Connector,
    bystander: Callable[[], None],
    call: Callable[..., object],
    code: grpc.StatusCode,
    text: str,
) -> None:
    wire = connect(shared_server.endpoint)
    before = engine_counters(shared_server)
    with pytest.raises(grpc.RpcError) as caught:
        call(wire.stub)
    assert caught.value.code() is code
    assert text in str(caught.value.details())
    bystander()
    after = engine_counters(shared_server)
    assert after["histospec_ingested_responses_total"] == before["histospec_ingested_responses_total"]
    assert wire.history([1]) == []


def test_bytes_that_are_no_message_end_the_call(shared_server: Server, bystander: Callable[[], None]) -> None:
    with grpc.insecure_channel(shared_server.endpoint) as channel:
        for kind, method in (("unary_unary", "Ingest"), ("stream_stream", "Draft")):
            call = getattr(channel, kind)(f"/histospec.v1.DraftService/{method}")
            for garbage in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", bytes(1000)):
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([garbage]))) if kind == "stream_stream" else call(garbage)
                assert caught.value.code() is INVALID
                assert "bytes are not a" in str(caught.value.details())
    bystander()


CONFIG = Config(max_batch=8, max_draft_tokens=8, max_prompt_tokens=8, max_session_tokens=8)
SMALL = st.binary(max_size=24)
IDS = st.integers(0, 3)
STEPS = st.builds(
    pb.Step,
    sessions=SMALL,
    positions=SMALL,
    lengths=SMALL | st.just(i32(0, 0)),
    tokens=SMALL,
    max_tokens=st.integers(0, 2**32 - 1),
    verify_cost=st.floats(width=32),
    late=st.integers(0, 2**32 - 1),
    verified=SMALL,
    model_drafted=SMALL,
    model_accepted=SMALL,
)
REQUESTS = st.builds(
    pb.DraftRequest,
    opens=st.lists(
        st.builds(
            pb.OpenSession,
            session=IDS,
            namespace=st.text(max_size=3),
            prompt=SMALL,
            generated=SMALL,
            seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        )
    ),
    step=STEPS,
    closes=st.lists(st.builds(pb.CloseSession, session=IDS, commit=st.booleans(), logprobs=SMALL)),
)


@settings(max_examples=300)
@given(REQUESTS)
def test_whatever_arrives_is_either_checked_or_refused(request: pb.DraftRequest) -> None:
    """A message that passes the checks has what the engine needs: whole arrays that fit each other."""
    try:
        message = checks.message(request, CONFIG)
    except (InvalidRequest, LimitExceeded):
        return
    assert all(opening.prompt.size and opening.prompt.min() >= 0 for opening in message.opens)
    assert [o.seed for o in message.opens] == [o.seed if o.HasField("seed") else None for o in request.opens]
    assert message.step is not None
    step = message.step
    assert len(step.sessions) == len(set(step.sessions)) == len(step.positions) == len(step.offsets) - 1 <= 8
    assert step.offsets[0] == 0
    assert (np.diff(step.offsets) >= 0).all()
    assert step.offsets[-1] == len(step.tokens)
    assert (step.tokens >= 0).all()
    assert (step.positions >= 0).all()
    for counts in step.report or ():
        assert counts is None or (len(counts) == len(step.sessions) and (counts >= 0).all())
