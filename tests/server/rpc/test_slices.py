"""Large steps in slices: the same drafts as in one call, and other streams run in between."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.native import Engine
from histospec.server.errors import InvalidRequest
from histospec.server.rpc import slices
from histospec.server.rpc.wire import Report
from histospec.v1 import draft_pb2 as pb

RESPONSE = np.random.default_rng(0).integers(0, 50, 400, dtype=np.int32)


class Recorder(Engine):
    """An engine that records the size of its steps."""

    def __init__(self) -> None:
        super().__init__(namespace_tokens=0)
        self.ingest("run", [1], [RESPONSE, RESPONSE[::-1].copy()])
        self.calls: list[tuple[int, int]] = []

    def step(self, sessions: Any, new_tokens: Any, new_offsets: Any, *limits: Any, **options: Any) -> Any:
        self.calls.append((len(sessions), len(new_tokens)))
        return super().step(sessions, new_tokens, new_offsets, *limits, **options)


def asked(sessions: list[int], texts: list[np.ndarray], positions: list[int], max_tokens: int) -> slices.StepRequest:
    return slices.StepRequest(
        np.array(sessions, np.int64),
        np.concatenate([*texts, np.empty(0, np.int32)]).astype(np.int32),
        np.cumsum([0, *map(len, texts)]).astype(np.int64),
        np.array(positions, np.int64),
        1000,
        max_tokens,
        0.02,
    )


@settings(max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=12, max_size=12), min_size=1, max_size=5),
    closed=st.sets(st.integers(0, 11), max_size=3),
    most=st.integers(30, 300),
    sessions=st.integers(1, 5),
    tokens=st.integers(40, 100),
    max_tokens=st.sampled_from([0, 1, 16]),
    report=st.none() | st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=12, max_size=12),
)
def test_slices_draft_what_one_call_drafts(
    lengths: list[list[int]],
    closed: set[int],
    most: int,
    sessions: int,
    tokens: int,
    max_tokens: int,
    report: list[tuple[int, int, int]] | None,
) -> None:
    whole, sliced = Recorder(), Recorder()
    ids = [[r.open("run", [1]) for _ in range(12)] for r in (whole, sliced)]
    at = [0] * 12
    gone: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SESSIONS", sessions)
        patch.setattr(slices, "DRAFTED", sessions)
        patch.setattr(slices, "TOKENS", tokens)
        for step in lengths:
            for row in closed - gone:  # the service closes sessions that were left out, whatever the reason
                for recorder, numbers in zip((whole, sliced), ids, strict=True):
                    recorder.close(numbers[row], commit=False)
            gone |= closed
            texts = [RESPONSE[a : a + n] for a, n in zip(at, step, strict=True)]
            said = None
            if report is not None:
                said = Report(*np.array([(v, d, min(d, a)) for v, d, a in report], np.int32).T.copy())
            one, many = (
                asked(numbers, texts, at, max_tokens)._replace(most_tokens=most, report=said) for numbers in ids
            )
            expected = slices._call(whole, one)
            found = asyncio.run(slices.step(sliced, many, slices.Pacer()))
            for a, b in zip(map(np.asarray, expected), map(np.asarray, found), strict=True):
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)
            at = [a + len(t) for a, t in zip(at, texts, strict=True)]
            closed = closed | set(np.flatnonzero(expected.outcomes).tolist())
    counted, again = (recorder.stats()["namespaces"]["run"] for recorder in (whole, sliced))
    assert counted["sources"]["model"]["draft_tokens"] == again["sources"]["model"]["draft_tokens"]
    assert counted["draft_tokens"] == again["draft_tokens"]
    assert whole.lengths(np.array(ids[0])).tolist() == sliced.lengths(np.array(ids[1])).tolist()
    assert all(n <= max(sessions, 1) and t <= tokens for n, t in sliced.calls)


def test_what_a_session_has_already_is_not_appended_again() -> None:
    recorder = Recorder()
    ids = [recorder.open("run", [1]) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "TOKENS", 7)  # cuts texts, too
        for positions, expected in (([0, 0, 0], 20), ([10, 0, 15], 35)):
            texts = [RESPONSE[p : p + 20] for p in positions]
            asyncio.run(slices.step(recorder, asked(ids, texts, positions, 4), slices.Pacer()))
            assert max(recorder.lengths(np.array(ids)).tolist()) == expected
    assert recorder.generated(ids[0]).tolist() == RESPONSE[:30].tolist()


def test_others_have_their_turn_between_slices() -> None:
    yields = 0

    async def others() -> None:
        nonlocal yields
        while True:
            yields += 1
            await asyncio.sleep(0)

    async def run() -> None:
        recorder = Recorder()
        ids = [recorder.open("run", [1]) for _ in range(1000)]
        beside = asyncio.create_task(others())
        texts = [RESPONSE[:40]] * 1000
        await slices.step(recorder, asked(ids, texts, [0] * 1000, 16), slices.Pacer())
        beside.cancel()
        assert yields >= slices.TURNS * (len(recorder.calls) - 1)
        assert len(recorder.calls) >= 1000 / slices.SESSIONS + 40_000 / slices.TOKENS
        assert max(tokens for _, tokens in recorder.calls) <= slices.TOKENS
        assert max(sessions for sessions, tokens in recorder.calls if not tokens) <= slices.DRAFTED

    asyncio.run(run())


def test_the_sessions_of_a_stream_that_ended_are_closed_in_turns() -> None:
    closed: list[int] = []
    seen = set()

    async def run() -> None:
        closing = asyncio.ensure_future(slices.close(range(4096), closed.append))
        while not closing.done():
            seen.add(len(closed))
            await asyncio.sleep(0)

    asyncio.run(run())
    assert closed == list(range(4096))
    assert len(seen) >= 4096 * slices.SESSION_WORK // slices.TOKENS


def test_turns_are_given_by_work() -> None:
    async def run() -> list[int]:
        seen, done = [], 0

        async def other() -> None:
            while True:
                seen.append(done)
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        pacer = slices.Pacer()
        for _ in range(8):
            await pacer.after(slices.TOKENS // 4)
            done += 1
        beside.cancel()
        return seen

    assert Counter(asyncio.run(run())) == {3: slices.TURNS, 7: slices.TURNS}


def request(opens: int) -> pb.DraftRequest:
    return pb.DraftRequest(
        sequence=3,
        opens=[pb.OpenSession(session=i, namespace="run", prompt=RESPONSE.tobytes(), seed=i) for i in range(opens)],
        step=pb.Step(sessions=b"12345678", verify_cost=0.5),
        closes=[pb.CloseSession(session=i, reward=0.0) for i in range(3)],
    )


def test_a_large_message_is_decoded_in_turns() -> None:
    large = request(40)
    data = large.SerializeToString()
    others = 0

    async def decode() -> pb.DraftRequest:
        nonlocal others
        decoding = asyncio.ensure_future(slices.decode(data, slices.Pacer()))
        while not decoding.done():
            others += 1
            await asyncio.sleep(0)
        return await decoding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "TOKENS", RESPONSE.nbytes // slices.DECODED)
        assert asyncio.run(decode()) == large
    assert others > 20


@settings(max_examples=200)
@given(st.data())
def test_what_is_no_message_is_refused_in_turns_as_at_once(data: st.DataObject) -> None:
    broken = bytearray(request(3).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        expected = pb.DraftRequest.FromString(bytes(broken))
    except DecodeError:
        with pytest.raises(InvalidRequest, match="bytes are not a DraftRequest"):
            asyncio.run(slices.decode(bytes(broken), slices.Pacer()))
    else:
        assert asyncio.run(slices.decode(bytes(broken), slices.Pacer())) == expected


def test_only_large_messages_are_left_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LARGE_MESSAGE", 100)
    read = slices.unless_large(pb.DraftRequest.FromString)
    small, large = request(0).SerializeToString()[:2], request(3).SerializeToString()
    assert read(small) == pb.DraftRequest(sequence=3)
    assert read(large) == large
