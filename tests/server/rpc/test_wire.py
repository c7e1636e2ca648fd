"""Arbitrary messages in any order: the server refuses them or answers consistently, and nothing is left behind."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.v1 import draft_pb2 as pb
from tests.support import hostile
from tests.support.wire_target import UNARY, Shard, framed
from tests.support.wires import Wire, i32


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    shard = Shard(tmp_path_factory.mktemp("shard"))
    yield shard
    shard.close()


def mostly(good: st.SearchStrategy, bad: st.SearchStrategy) -> st.SearchStrategy:
    """Valid with a probability that makes some whole messages valid."""
    return st.integers(0, 39).flatmap(lambda number: bad if number == 23 else good)


def packed(dtype: str, values: st.SearchStrategy, most: int = 4) -> st.SearchStrategy[bytes]:
    """Returns an array as it travels."""
    return st.lists(values, min_size=1, max_size=most).map(lambda some: np.array(some, dtype).tobytes())


def step(rows: list[tuple[int, int, list[int]]]) -> pb.Step:
    """Returns a consistent step; a row has a session, its position and its tokens."""
    sessions, positions = [session for session, _, _ in rows], [position for _, position, _ in rows]
    return Wire.step(sessions, [text for _, _, text in rows], positions, max_tokens=4)


WIDE = packed("<i4", st.integers(-1, 2**31 - 1), 12) | st.binary(max_size=9)
TOKENS = mostly(packed("<i4", st.integers(0, 2), 8), WIDE)
ID = mostly(st.integers(0, 2), st.integers(0, 2**64 - 1))
WHO = {
    "namespace": mostly(st.just("a"), st.text(max_size=2)),
    "prompt": mostly(st.just(i32([1, 2])), WIDE),
    "problem": mostly(st.just(""), st.text(max_size=2)),
}
NUMBERS = st.floats(width=32)
EPOCHS = mostly(st.none() | st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))
SEEDS = st.none() | st.integers(0, 2) | st.integers(-(2**63), 2**63 - 1)
REWARDS = mostly(st.none() | st.just(0.5), NUMBERS)
LOGPROBS = mostly(st.just(b""), packed("<f4", NUMBERS) | st.binary(max_size=9))

OPEN = st.builds(pb.OpenSession, session=ID, generated=st.just(b"") | TOKENS, seed=SEEDS, **WHO)
ROWS = st.lists(
    st.tuples(ID, st.sampled_from([0, 0, 1, 3]), st.lists(st.integers(0, 2), max_size=6)),
    max_size=3, unique_by=lambda row: row[0],
)  # fmt: skip
ANY_STEP = st.builds(
    pb.Step, sessions=WIDE, positions=WIDE, lengths=WIDE, tokens=WIDE, max_tokens=st.integers(0, 2**32 - 1),
    verify_cost=NUMBERS,
)  # fmt: skip
CLOSE = st.builds(
    pb.CloseSession, session=ID, commit=st.booleans(), epoch=EPOCHS, reward=REWARDS, logprobs=LOGPROBS,
    generated=mostly(st.integers(0, 6), st.integers(0, 2**32 - 1)),
)  # fmt: skip
DRAFT = st.builds(
    pb.DraftRequest, sequence=mostly(st.integers(0, 3), st.integers(0, 2**64 - 1)),
    opens=st.lists(OPEN, max_size=2, unique_by=lambda o: o.session),
    step=st.none() | mostly(ROWS.map(step), ANY_STEP),
    closes=st.lists(CLOSE, max_size=2, unique_by=lambda c: c.session),
)  # fmt: skip
RESPONSE = st.builds(
    pb.Response, tokens=TOKENS, logprobs=LOGPROBS, reward=REWARDS, seed=SEEDS,
    generated=mostly(st.just(b""), st.binary(max_size=4)),
)  # fmt: skip
REQUESTS = {
    "Ingest": st.builds(pb.IngestRequest, responses=st.lists(RESPONSE, max_size=3), epoch=EPOCHS, **WHO),
    "History": st.builds(pb.HistoryRequest, limit=st.integers(0, 2**32 - 1), **WHO),
    "PredictLength": st.builds(
        pb.PredictLengthRequest, generated=st.integers(0, 2**32 - 1), quantiles=st.lists(st.floats(), max_size=3), **WHO
    ),
    "PredictLengths": st.builds(
        pb.PredictLengthsRequest,
        namespace=WHO["namespace"],
        quantiles=st.lists(st.floats(), max_size=3),
        problems=st.lists(
            st.builds(
                pb.ExpectedResponse, prompt=WHO["prompt"], problem=WHO["problem"], generated=st.integers(0, 2**32 - 1)
            ),
            max_size=10,
        ),
    ),
    "DropNamespace": st.builds(pb.DropNamespaceRequest, namespace=WHO["namespace"]),
    "Rewind": st.builds(pb.RewindRequest, namespace=WHO["namespace"], epoch=st.integers(-1, 3)),
}


@settings(max_examples=150)
@given(st.lists(DRAFT, max_size=5))
def test_any_stream(shard: Shard, messages: list[pb.DraftRequest]) -> None:
    shard.draft([message.SerializeToString() for message in messages])


@settings(max_examples=100)
@given(st.one_of([st.tuples(st.just(method), requests) for method, requests in REQUESTS.items()]))
def test_any_request(shard: Shard, call: tuple[str, Any]) -> None:
    method, request = call
    shard.unary(method, request.SerializeToString())


def test_sound_messages_pass_and_spoiled_ones_do_no_harm(shard: Shard) -> None:
    chance = random.Random(0)
    for method in hostile.METHODS:
        outcomes = set()
        for _ in range(100):
            shard.forget()  # a corrupted name may create another namespace
            message = hostile.sound(method, chance)
            outcomes.add(shard.take(framed(method, [message])))
            shard.take(framed(method, [message, hostile.spoiled(message, chance)]))
            if method in UNARY:
                shard.unary(method, hostile.spoiled(message, chance))
        assert "" in outcomes
