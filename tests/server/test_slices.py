"""Large steps in slices: the same drafts as in one call, and others have their turn in between."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.native import Engine
from histospec.server import slices

RESPONSE = np.random.default_rng(0).integers(0, 50, 400, dtype=np.int32)


class Recorder:
    """An engine that notes how large its steps are."""

    def __init__(self) -> None:
        self.engine = Engine(namespace_tokens=0)
        self.engine.ingest("run", [1], [RESPONSE, RESPONSE[::-1].copy()])
        self.calls: list[tuple[int, int]] = []

    def step(self, sessions, tokens, offsets, **options):
        self.calls.append((len(sessions), len(tokens)))
        return self.engine.step(sessions, tokens, offsets, **options)


def asked(sessions: list[int], texts: list[np.ndarray], positions: list[int], max_tokens: int) -> slices.Asked:
    return slices.Asked(
        np.array(sessions, np.int64),
        np.concatenate([*texts, np.empty(0, np.int32)]).astype(np.int32),
        np.cumsum([0, *map(len, texts)]).astype(np.int64),
        np.array(positions, np.int64),
        max_tokens,
        0.02,
        1.0,
    )


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=12, max_size=12), min_size=1, max_size=5),
    sessions=st.integers(1, 5),
    tokens=st.integers(40, 100),
    max_tokens=st.sampled_from([0, 1, 16]),
)
def test_slices_draft_what_one_call_drafts(lengths, sessions, tokens, max_tokens):
    whole, sliced = Recorder(), Recorder()
    ids = [[r.engine.open("run", [1]) for _ in range(12)] for r in (whole, sliced)]
    at = [0] * 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SESSIONS", sessions)
        patch.setattr(slices, "TOKENS", tokens)
        for step in lengths:
            texts = [RESPONSE[a : a + n] for a, n in zip(at, step, strict=True)]
            one = whole.engine.step(*asked(ids[0], texts, at, max_tokens)[:3], max_tokens=max_tokens, verify_cost=0.02)
            many = asyncio.run(slices.step(sliced, asked(ids[1], texts, at, max_tokens), slices.Turns()))
            for a, b in zip(one, many, strict=True):
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)
            at = [a + len(t) for a, t in zip(at, texts, strict=True)]
    assert whole.engine.lengths(np.array(ids[0])).tolist() == sliced.engine.lengths(np.array(ids[1])).tolist()
    assert all(n <= max(sessions, 1) and t <= tokens for n, t in sliced.calls)


def test_what_a_session_has_already_is_not_appended_again():
    recorder = Recorder()
    ids = [recorder.engine.open("run", [1]) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "TOKENS", 7)  # texts are cut, too
        for positions, expected in (([0, 0, 0], 20), ([10, 0, 15], 35)):
            texts = [RESPONSE[p : p + 20] for p in positions]
            asyncio.run(slices.step(recorder, asked(ids, texts, positions, 4), slices.Turns()))
            assert max(recorder.engine.lengths(np.array(ids)).tolist()) == expected
    assert recorder.engine.generated(ids[0]).tolist() == RESPONSE[:30].tolist()


def test_others_have_their_turn_between_slices():
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        recorder = Recorder()
        ids = [recorder.engine.open("run", [1]) for _ in range(1000)]
        beside = asyncio.create_task(others())
        texts = [RESPONSE[:40]] * 1000
        await slices.step(recorder, asked(ids, texts, [0] * 1000, 16), slices.Turns())
        beside.cancel()
        assert turns >= len(recorder.calls) - 1
        assert len(recorder.calls) >= 1000 / slices.SESSIONS + 40_000 / slices.TOKENS

    asyncio.run(run())


def test_turns_are_given_by_work():
    async def run() -> list[int]:
        seen, done = [], 0

        async def other() -> None:
            while True:
                seen.append(done)
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        turns = slices.Turns()
        for _ in range(8):
            await turns.after(slices.TOKENS // 4)
            done += 1
        beside.cancel()
        return seen

    assert [b - a for a, b in pairwise(asyncio.run(run()))] == [4]
