"""Answers that cannot be true: of a hostile server, of another version, or of another program.

Each is refused before it costs time or memory. The step gets empty drafts, the breaker opens, the log has one line a
minute, and no call of a worker raises.
"""

import logging
import math
import os
import random
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.client import AsyncDraftClient, Breaker, DraftClient, ServerError, Timeouts
from histospec.client.config import Limits
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.step import GarbledReply
from histospec.client.core.stream_state import StreamState
from histospec.client.errors import from_status
from histospec.v1 import draft_pb2 as pb
from tests.support.hostile import spoiled
from tests.support.odd_server import OddServer
from tests.support.waiting import eventually

PATIENT = 60.0
ANSWERS = int(os.environ.get("HISTOSPEC_CHAOS_ANSWERS", "150"))
LONG = Breaker(cooldown=3600.0, cooldown_max=3600.0, reconnect=3600.0)
QUICK = Breaker(cooldown=0.001, cooldown_max=0.001, reconnect=0.001)


def i32(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def f32(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def u64(*numbers: int) -> bytes:
    return np.array(numbers, "<u8").tobytes()


MANY = 2_000_000
DRAFT_OF_2 = {"lengths": i32(2), "tokens": i32(5, 6), "probs": f32(0.5, 0.5)}
WRONG: dict[str, dict[str, Any]] = {
    "100,000 tokens for 8": {"lengths": i32(100_000), "tokens": i32(*range(100_000)), "probs": f32(*[0.5] * 100_000)},
    "9 tokens for 8": {"lengths": i32(9), "tokens": i32(*range(9)), "probs": f32(*[0.5] * 9)},
    "a negative length": {"lengths": i32(-1)},
    "a negative length that adds up": {"lengths": i32(-1, 2), "tokens": i32(5), "probs": f32(0.5)},
    "a negative token": {"lengths": i32(1), "tokens": i32(-3), "probs": f32(0.5)},
    "probability NaN": {"lengths": i32(1), "tokens": i32(5), "probs": f32(float("nan"))},
    "probability -NaN": {"lengths": i32(1), "tokens": i32(5), "probs": u64(0xFFC00000)[:4]},
    "probability infinity": {"lengths": i32(1), "tokens": i32(5), "probs": f32(float("inf"))},
    "probability 1.5": {"lengths": i32(1), "tokens": i32(5), "probs": f32(1.5)},
    "probability -0.5": {"lengths": i32(1), "tokens": i32(5), "probs": f32(-0.5)},
    "too few runners-up": DRAFT_OF_2 | {"runner_up_tokens": i32(7), "runner_up_probs": f32(0.1)},
    "too many runners-up": DRAFT_OF_2 | {"runner_up_tokens": i32(7, 7, 7), "runner_up_probs": f32(0.1, 0.1, 0.1)},
    "runners-up without probabilities": DRAFT_OF_2 | {"runner_up_tokens": i32(7, 8)},
    "a runner-up below -1": DRAFT_OF_2 | {"runner_up_tokens": i32(7, -2), "runner_up_probs": f32(0.1, 0.1)},
    "a runner-up that is drafted": DRAFT_OF_2 | {"runner_up_tokens": i32(7, 6), "runner_up_probs": f32(0.1, 0.1)},
    "a runner-up of probability NaN": DRAFT_OF_2
    | {"runner_up_tokens": i32(7, 8), "runner_up_probs": f32(0.1, float("nan"))},
    "drafts for 2 M sessions": {"lengths": bytes(4 * MANY)},
    "2 M unknown sessions": {"lengths": i32(0), "unknown": u64(*range(MANY))},
    "5,000 unknown sessions": {"lengths": i32(0), "unknown": u64(*range(5000))},
    "an unknown session that never was": {"lengths": i32(0), "unknown": u64(2**63)},
    "unknown session 0": {"lengths": i32(0), "unknown": u64(0)},
    "half an unknown session": {"lengths": i32(0), "unknown": bytes(4)},
    "a refusal of a session that never was": {"lengths": i32(0), "refusals": [pb.Refusal(session=7, reason="no")]},
    "20,000 refusals": {"lengths": i32(0), "refusals": [pb.Refusal(session=1)] * 20_000},
    "a refusal of 10 MB": {"lengths": i32(0), "refusals": [pb.Refusal(session=1, reason="x" * 10_000_000)]},
    "a continued session without a prompt": {"lengths": i32(0), "continued": u64(1)},
    "a continued session with no tokens of its prompt": {"lengths": i32(0), "continued": u64(1), "prompts": i32(0)},
    "a continued session with more than its prompt": {"lengths": i32(0), "continued": u64(1), "prompts": i32(3)},
    "a continued session that never was": {"lengths": i32(0), "continued": u64(9), "prompts": i32(1)},
    "2 M continued sessions": {"lengths": i32(0), "continued": u64(*range(MANY)), "prompts": bytes(4 * MANY)},
    "another sequence": {"lengths": i32(0), "sequence": 2**63},
}


def answering(**fields: Any) -> Callable[[pb.DraftRequest, Any], pb.DraftResponse]:
    return lambda request, context: pb.DraftResponse(**({"sequence": request.sequence} | fields))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_no_answer(odd_server: OddServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    odd_server.answer = answering(**WRONG[name])
    with DraftClient(odd_server.endpoint, "run", breaker=LONG, deadline=PATIENT) as client:
        sessions = client.open([[1, 2]])
        for n in range(50):
            assert [len(draft) for draft in client.step(sessions, [[n]], max_tokens=8)] == [0]
        stats = client.stats()
        assert stats.breakers == {odd_server.endpoint: "open"}
        assert (stats.failed, stats.late, stats.draft_tokens, stats.refused) == (1, 0, 0, 0)
        client.finish(sessions)
        client.flush(0.1)
        assert client.stats().pending_commits == 1
    (line,) = [record.getMessage() for record in caplog.records if "WITHOUT drafts" in record.getMessage()]
    assert "garbled reply: " in line
    assert len(line) < 500


def test_more_answers_than_messages_are_wrong() -> None:
    stream = StreamState("run", Limits(), ServerLimits())
    stream.queued = 2
    for sequence in (1, 2):
        stream.interpret(pb.DraftResponse(sequence=sequence), 0.0)
    with pytest.raises(GarbledReply, match="3 answers to 2 messages"):
        stream.interpret(pb.DraftResponse(sequence=2), 0.0)


def test_a_reason_is_logged_once_a_minute_and_cannot_write_to_the_terminal(
    odd_server: OddServer, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(request: pb.DraftRequest, context: Any) -> pb.DraftResponse:
        numbers = [o.session for o in request.opens]
        refusals = [pb.Refusal(session=number, reason="\x1b[2J\n" + "no" * 200) for number in numbers]
        return pb.DraftResponse(sequence=request.sequence, lengths=bytes(len(request.step.lengths)), refusals=refusals)

    odd_server.answer = refuse
    with DraftClient(odd_server.endpoint, "run", deadline=PATIENT) as client:
        for n in range(40):
            client.step(client.open([[n]]), [[1]])
        assert client.stats().refused == 40
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert line.isprintable()
    assert len(line) < 500


def test_workers_survive_any_answer(odd_server: OddServer, caplog: pytest.LogCaptureFixture) -> None:
    """Sound answers with other fields, flipped bits, cut bytes: no call of a worker raises, and drafts come back."""
    chance = random.Random(0)

    def mutate(request: pb.DraftRequest, context: Any) -> pb.DraftResponse | bytes | None:
        answer = odd_server.draft(request)
        kind = chance.randrange(5)
        if answer is None or kind == 0:
            return answer
        if kind == 1:
            return spoiled(answer.SerializeToString(), chance) or b"\xff"
        for _ in range(kind):
            field = chance.choice(["lengths", "tokens", "probs", "unknown", "sequence", "refusals"])
            if field == "sequence":
                answer.sequence = chance.choice([0, 1, answer.sequence, 2**64 - 1])
            elif field == "refusals":
                number = chance.choice([0, 1, 2, 3, 2**64 - 1])
                answer.refusals.add(session=number, later=chance.random() < 0.5, reason="no")
            else:
                length = chance.choice([0, 1, 4, 8, 12, 4096])
                setattr(answer, field, chance.randbytes(length) if chance.random() < 0.5 else bytes(length))
        return answer

    caplog.set_level(logging.WARNING)
    # An answer to another step leaves its own step to wait for the deadline.
    with DraftClient(odd_server.endpoint, "run", breaker=QUICK, deadline=1.0) as client:
        odd_server.answer = mutate
        for n in range(ANSWERS):
            sessions = client.open([[n, i] for i in range(3)])
            client.step(sessions, [[1], [2, 3], []], max_tokens=4)
            client.receive(client.send(sessions, [[1], [], [4]], max_tokens=0))
            client.finish(sessions, commit=n % 2 == 0)
            client.flush(0.01)
        odd_server.answer = odd_server.draft
        (session,) = client.open([[1]])
        eventually(lambda: len(client.step([session], [[1]])[0]))
        stats = client.stats()
        assert stats.failed > 0
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    assert len([record for record in caplog.records if "WITHOUT drafts" in record.getMessage()]) <= 3


# ---- single calls -------------------------------------------------------------------------------------------------


class Answering:
    """A server whose single calls answer what a test says."""

    def __init__(self) -> None:
        self.answer: Any = None
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.answer, response_serializer=lambda answer: answer.SerializeToString()
        )
        names = ("History", "PredictLength", "PredictLengths", "Topology", "Inspect")
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("histospec.v1.DraftService", dict.fromkeys(names, handler))]
        )
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture(scope="module")
def answering_server() -> Iterator[Answering]:
    server = Answering()
    yield server
    server.stop()


def history(*responses: pb.Response) -> pb.HistoryResponse:
    return pb.HistoryResponse(responses=responses)


def shards(*addresses: str) -> pb.TopologyResponse:
    return pb.TopologyResponse(shards=[pb.Shard(name=f"s{i}", address=a) for i, a in enumerate(addresses)])


CALLS: dict[str, Callable[[DraftClient], object]] = {
    "history": lambda client: client.history([1], limit=2),
    "histories": lambda client: client.histories([[1]], limit=2),
    "length": lambda client: client.predict_length([1], quantiles=[0.5, 0.9]),
    "lengths": lambda client: client.predict_lengths([[1], [2]], quantiles=[0.5]),
    "topology": lambda client: client.topology(),
    "inspect": lambda client: client.inspect(),
}
PREDICTION = pb.PredictLengthResponse(lengths=[3.0])
WRONG_ANSWERS: list[tuple[str, Any, str]] = [
    ("history", history(*[pb.Response(tokens=i32(1))] * 3), "3, at most 2 were asked for"),
    ("history", history(pb.Response(tokens=b"abc")), r"responses\[0\].tokens: 3 bytes"),
    ("history", history(pb.Response()), r"responses\[0\].tokens: none"),
    ("history", history(pb.Response(tokens=i32(1, -2))), r"responses\[0\].tokens: -2"),
    ("histories", history(pb.Response(tokens=i32(1), logprobs=f32(1, 2))), r"logprobs: 2 values for 1 tokens"),
    ("history", history(pb.Response(tokens=i32(1), generated=b"\1\1")), "generated: 2 values for 1 tokens"),
    ("history", history(pb.Response(tokens=i32(1), epoch=-1)), "epoch -1"),
    ("history", history(pb.Response(tokens=i32(1), reward=float("nan"))), "reward nan"),
    ("history", history(pb.Response(tokens=i32(1), alternatives=b"\xff")), r"alternatives: "),
    ("length", pb.PredictLengthResponse(quantiles=[0.5], lengths=[3]), "quantiles: 1, and 2 were asked for"),
    ("length", pb.PredictLengthResponse(quantiles=[0.5, 0.9], lengths=[3]), "lengths: 1 for 2 quantiles"),
    ("length", pb.PredictLengthResponse(quantiles=[0.5, 0.9], lengths=[3, float("nan")]), "nan"),
    ("length", pb.PredictLengthResponse(quantiles=[0.5, 9.0], lengths=[3, 4]), "quantiles"),
    ("length", pb.PredictLengthResponse(quantiles=[0.5, 0.9], lengths=[-3, 4]), "-3"),
    ("lengths", pb.PredictLengthsResponse(quantiles=[0.5], predictions=[PREDICTION]), "predictions: 1, and 2"),
    ("lengths", pb.PredictLengthsResponse(predictions=[PREDICTION] * 2), "quantiles: 0, and 1"),
    ("topology", shards(*["h:1"] * 5000), "shards: 5000 are more than the limit of 4096"),
    ("topology", shards("h:1", "no address"), r"shards\[1\]"),
    ("topology", shards("h:99999"), r"shards\[0\]"),
    ("topology", shards("h" * 1000 + ":1"), r"shards\[0\]"),
    ("topology", pb.TopologyResponse(shards=[pb.Shard(name="a\x1b[2J\nb", address="h:1")]), r"shards\[0\]"),
    ("inspect", pb.InspectResponse(similar=["x"] * 9), "9 other namespaces"),
    ("inspect", pb.InspectResponse(time=math.inf), "time: inf"),
    ("inspect", pb.InspectResponse(time=math.nan), "time: nan"),
    ("inspect", pb.InspectResponse(time=-1e300), "time: -1e"),
]


@pytest.mark.parametrize(("call", "answer", "what"), WRONG_ANSWERS, ids=[f"{c}: {w}" for c, _, w in WRONG_ANSWERS])
def test_a_wrong_answer_to_a_call_is_an_error_of_the_server(
    answering_server: Answering, call: str, answer: Any, what: str
) -> None:
    answering_server.answer = answer
    with DraftClient(answering_server.endpoint, "run", timeouts=Timeouts(shutdown=0.01)) as client:
        with pytest.raises(ServerError, match=rf"on {answering_server.endpoint}: garbled answer: .*{what}") as caught:
            CALLS[call](client)
        assert len(str(caught.value)) < 1000


def test_the_texts_of_an_answer_cannot_write_to_the_terminal(answering_server: Answering) -> None:
    text = "\x1b[2J\nforged"
    shared = [pb.SharedPrompts(namespace=text)]
    answering_server.answer = pb.InspectResponse(
        shard=text, version=text, trouble=text, rights=[text], similar=[text], shared=shared
    )
    with DraftClient(answering_server.endpoint, "run", timeouts=Timeouts(shutdown=0.01)) as client:
        (found,) = client.inspect()
        assert found is not None
        texts = [found.shard, found.version, found.trouble, *found.rights, *found.similar, found.shared[0].namespace]
        assert texts == ["?[2J?forged"] * 6
    assert str(from_status(grpc.StatusCode.INTERNAL, text, "Inspect")) == "Inspect: ?[2J?forged"


@pytest.mark.asyncio
async def test_so_it_is_for_asyncio(answering_server: Answering) -> None:
    answering_server.answer = history(pb.Response(tokens=b"abc"))
    async with AsyncDraftClient(answering_server.endpoint, "run", timeouts=Timeouts(shutdown=0.01)) as client:
        with pytest.raises(ServerError, match="garbled answer"):
            await client.history([1])


@pytest.mark.parametrize(
    "answer",
    [shards("no address"), shards(*["h:1"] * 5000), shards(*[f"h{i}:1" for i in range(200_000)])],
    ids=["no address", "many", "more bytes than gRPC takes"],
)
def test_discovery_ignores_a_wrong_answer(answering_server: Answering, answer: Any) -> None:
    answering_server.answer = answer
    timeouts = Timeouts(call=0.5, shutdown=0.01)
    with DraftClient(f"discover://{answering_server.endpoint}", "run", timeouts=timeouts, deadline=PATIENT) as client:
        assert [len(draft) for draft in client.step(client.open([[1]]), [[2]])] == [0]
        assert client._core.shards[0].endpoint.address == ""


def test_a_limit_of_any_length_is_read() -> None:
    """Metadata and statuses are text of the server: a number of thousands of digits takes Python an error to read."""
    assert ServerLimits.from_metadata([("histospec-max-batch", "9" * 8000)]) == ServerLimits()
    assert ServerLimits.from_metadata([("histospec-max-batch", "12")]) == ServerLimits(batch=12)
    ServerLimits().refused(f"opens: 5 are more than the limit of {'9' * 8000}")
