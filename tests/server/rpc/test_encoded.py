"""Bounds of messages before they are decoded: limits hold, and valid messages of any shape pass. Encoded histories."""

from io import BytesIO
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from histospec.server.errors import LimitExceeded
from histospec.server.rpc import encoded
from histospec.server.rpc.interceptors import checks
from histospec.server.settings.config import Config
from histospec.server.stores.interface import Record
from histospec.server.stores.records import to_message
from histospec.v1 import draft_pb2 as pb

MORE = encoded.SMALL + 1  # parts: enough for a walk, and more fields than allowed
CHECKS = checks(Config())
EMPTY_OPEN, EMPTY_CLOSE, EMPTY_RESPONSE, EMPTY_STEP = b"\x12\x00", b"\x22\x00", b"\x22\x00", b"\x1a\x00"
QUANTILE = b"\x29" + bytes(8)
SEQUENCE, UNKNOWN = b"\x08\x01", b"\x78\x01"
GROUP = b"\x7b\x7c"


@pytest.mark.parametrize(
    ("kind", "part", "words"),
    [
        ("DraftRequest", EMPTY_OPEN, "opens: 4097 are more than the limit of 4096"),
        ("DraftRequest", EMPTY_CLOSE, "closes: 4097 are more than the limit of 4096"),
        ("DraftRequest", EMPTY_STEP, "fields: 65537 are more than the limit of 65536"),
        ("DraftRequest", SEQUENCE, "fields: 65537 are more than the limit of 65536"),
        ("DraftRequest", UNKNOWN, "fields: 65537 are more than the limit of 65536"),
        ("DraftRequest", GROUP, "fields: 65537 are more than the limit of 65536"),
        ("IngestRequest", EMPTY_RESPONSE, "responses: 4097 are more than the limit of 4096"),
        ("UpdateCacheRequest", EMPTY_STEP, "responses: 4097 are more than the limit of 4096"),
        ("PredictLengthRequest", QUANTILE, "quantiles: 65 are more than the limit of 64"),
        ("PredictLengthsRequest", EMPTY_OPEN, "problems: 4097 are more than the limit of 4096"),
        ("PredictLengthsRequest", b"\x19" + bytes(8), "quantiles: 65 are more than the limit of 64"),
        ("TopologyRequest", SEQUENCE, "fields: 65537 are more than the limit of 65536"),
    ],
)
def test_more_parts_than_the_limit_are_refused(kind: str, part: bytes, words: str) -> None:
    with pytest.raises(LimitExceeded, match=words):
        CHECKS[kind](part * MORE)


def test_packed_numbers_are_counted() -> None:
    request = pb.PredictLengthRequest(namespace="a", quantiles=[0.5] * MORE)
    with pytest.raises(LimitExceeded, match=f"quantiles: {MORE} are more than the limit of 64"):
        CHECKS["PredictLengthRequest"](request.SerializeToString())


def test_the_fields_of_parts_count_together() -> None:
    opens = b"\x12\xa0\x1f" + SEQUENCE * 2000
    with pytest.raises(LimitExceeded, match="fields: 65537 are more"):
        CHECKS["DraftRequest"](opens * 2000)


def test_bytes_that_are_no_message_are_found_out() -> None:
    for end in (b"\x12\xff", b"\x12\x7f\x01", b"\x0e", b"\x09\x01", b"\x08" + b"\xff" * 10):
        with pytest.raises(DecodeError):
            CHECKS["DraftRequest"](pb.DraftRequest(step=pb.Step(tokens=bytes(MORE))).SerializeToString() + end)


TEXTS = st.binary(max_size=9)
OPENS = st.builds(
    pb.OpenSession, session=st.integers(0, 2**64 - 1), prompt=TEXTS, seed=st.integers(-(2**63), 2**63 - 1)
)
CLOSES = st.builds(pb.CloseSession, commit=st.booleans(), reward=st.floats(width=32), logprobs=TEXTS)


@given(st.lists(OPENS, max_size=5), st.lists(CLOSES, max_size=5), TEXTS)
def test_sound_messages_pass(opens: list[pb.OpenSession], closes: list[pb.CloseSession], tokens: bytes) -> None:
    request = pb.DraftRequest(
        sequence=7, opens=opens, closes=closes, step=pb.Step(tokens=tokens, positions=bytes(MORE))
    )
    CHECKS["DraftRequest"](request.SerializeToString())


def test_the_largest_message_that_is_allowed_passes() -> None:
    most = 2**64 - 1
    open_ = pb.OpenSession(session=most, namespace="run", prompt=bytes(40), problem="p", generated=b"1234", seed=-1)
    close = pb.CloseSession(session=most, commit=True, epoch=1, reward=1.0, logprobs=b"1234", generated=1, changes=1)
    request = pb.DraftRequest(sequence=1, opens=[open_] * 4096, closes=[close] * 4096, step=pb.Step(tokens=bytes(4096)))
    CHECKS["DraftRequest"](request.SerializeToString())


def arrays(*sizes: int) -> st.SearchStrategy[bytes]:
    """Returns arrays of these sizes, all bytes alike."""
    return st.builds(lambda size, byte: bytes([byte]) * size, st.sampled_from(sizes), st.integers(0, 255))


@given(
    st.lists(
        st.builds(
            Record,
            tokens=arrays(4, 124, 128, 16_384, encoded.PIECE, 3 * encoded.PIECE + 4),
            epoch=st.sampled_from([0, 1, 1 << 40]),
            reward=st.sampled_from([None, 0.0, -1.5]),
            logprobs=arrays(0, 4, 128, encoded.PIECE + 4),
            generated=arrays(0, 1, 127),
            seed=st.sampled_from([None, 0, -5, 1 << 60]),
            alternatives=arrays(0, 7, 70_000),
        ),
        max_size=3,
    )
)
def test_an_encoded_history_is_what_protobuf_decodes(records: list[Record]) -> None:
    assert pb.HistoryResponse.FromString(encoded.history(records)) == pb.HistoryResponse(
        responses=map(to_message, records)
    )


def test_a_history_is_encoded_without_a_long_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 30 MiB into a larger buffer held the interpreter's lock for 40 ms."""
    allocated, written = [], []

    class Counted(BytesIO):
        def __init__(self, initial: bytes) -> None:
            allocated.append(len(initial))
            super().__init__(initial)

        def write(self, data: Any) -> int:
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(encoded, "BytesIO", Counted)
    whole = encoded.history([Record(bytes(4 << 20), 1)] * 3)
    assert allocated == [len(whole)]
    assert max(written) <= encoded.PIECE
