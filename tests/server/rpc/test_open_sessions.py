"""A stream that ended counts its sessions until the engine has closed all of them."""

import asyncio
from unittest.mock import Mock

import numpy as np
import pytest

from histospec.native import Engine
from histospec.server.history.tenants import Tenants
from histospec.server.rpc import wire
from histospec.server.rpc.open_sessions import SHARED, OpenSessions
from histospec.server.security.access import Access
from histospec.server.stores.interface import Problem

SESSIONS = 100  # several slices
PROMPT = np.arange(40, dtype=np.int32)
NO_TOKENS = np.empty(0, np.int32)


def test_sessions_count_until_the_engine_has_closed_them() -> None:
    asyncio.run(all_are_closed())


async def all_are_closed() -> None:
    engine = Engine(namespace_tokens=0)
    sessions = OpenSessions(engine, Mock(tenants=Tenants(Access(None), engine)))
    for number in range(SESSIONS):
        problem = Problem("run", PROMPT.tobytes())
        await sessions.open(wire.Open(number, problem, PROMPT, NO_TOKENS, None, False, ""))
    ending = sessions.forget_all()
    seen = []
    while not ending.done():
        assert len(sessions) == engine.stats()["sessions"]
        seen.append(len(sessions))
        await asyncio.sleep(0)
    assert seen[0] == SESSIONS
    assert len(set(seen)) > 2, "the sessions were closed all at once"
    assert len(sessions) == engine.stats()["sessions"] == 0


def test_a_client_cannot_choose_the_keys_of_the_table() -> None:
    asyncio.run(keys_are_secret())


async def keys_are_secret() -> None:
    engine = Engine(namespace_tokens=0)
    sessions = OpenSessions(engine, Mock(tenants=Tenants(Access(None), engine)))
    chosen = [0, 1, 2**61 - 1, 2**64 - 1]
    for number in chosen:
        await sessions.open(wire.Open(number, Problem("run", PROMPT.tobytes()), PROMPT, NO_TOKENS, None, False, ""))
    assert not set(chosen) & set(sessions._ids)
    assert not set(chosen) & set(sessions._origins)
    assert all(number in sessions for number in chosen)
    assert sessions.numbers([5, *chosen]).tolist()[0] == -1
    assert (engine.lengths(sessions.numbers(chosen)) == 0).all()
    assert sessions.forget(2**64 - 1)
    assert 2**64 - 1 not in sessions
    await sessions.forget_all()
    assert engine.stats()["sessions"] == 0


def test_siblings_of_all_streams_share_one_prompt() -> None:
    asyncio.run(prompts_are_shared())


async def prompts_are_shared() -> None:
    engine = Engine(namespace_tokens=0)
    streams = [OpenSessions(engine, Mock(tenants=Tenants(Access(None), engine))) for _ in range(2)]
    for sessions in streams:
        for number in range(3):
            problem = Problem("run", PROMPT.tobytes())
            await sessions.open(wire.Open(number, problem, PROMPT, NO_TOKENS, None, False, ""))
    assert len({id(origin.problem) for sessions in streams for origin in map(sessions.origin, range(3)) if origin}) == 1
    assert len(SHARED) == 1
    await streams[0].forget_all()
    assert len(SHARED) == 1
    await streams[1].forget_all()
    assert not SHARED, "the prompt outlives its sessions"


def test_prompts_of_one_digest_are_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_128_digest", lambda prompt: b"the same")
    asyncio.run(problems_are_kept_apart())


async def problems_are_kept_apart() -> None:
    engine = Engine(namespace_tokens=0)
    sessions = OpenSessions(engine, Mock(tenants=Tenants(Access(None), engine)))
    prompts = [PROMPT, PROMPT + 1, PROMPT]
    for number, prompt in enumerate(prompts):
        problem = Problem("run", prompt.tobytes())
        await sessions.open(wire.Open(number, problem, prompt, NO_TOKENS, None, False, ""))
    kept = [origin.problem.prompt for origin in map(sessions.origin, range(3)) if origin]
    assert kept == [prompt.tobytes() for prompt in prompts]
    await sessions.forget_all()
    assert not SHARED
