"""A stream that ends with many sessions does not cost another stream its few, while the server closes them."""

import asyncio
from pathlib import Path

import pytest

from histospec.server.errors import Crowded, LimitExceeded
from histospec.server.rpc import service as rpc_service
from tests.support.draft_calls import MEMORY, Call, served
from tests.support.waiting import until

SESSIONS = 400  # the server closes them in many slices
TOKENS = 10_000  # of each session after its step, so that all together exceed MEMORY


@pytest.mark.asyncio
async def test_a_stream_that_ends_costs_no_other_its_session(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, service):
        few, many = Call(service), Call(service)
        few.open(range(1))
        many.open(range(SESSIONS))
        await many.step(range(SESSIONS), TOKENS)
        assert engine.running_bytes() > MEMORY
        many.end()
        await many.serving
        assert engine.running_bytes() > MEMORY, "the sessions are closed already"
        answer = await few.step(range(1), 5)
        assert not answer.refusals
        few.end()
        await few.serving
        await until(lambda: engine.stats()["sessions"] == 0, "a session is left")


@pytest.mark.asyncio
@pytest.mark.parametrize(("error", "waits"), [(LimitExceeded, False), (Crowded, True)])
async def test_streams_of_a_caller_pause_after_a_refusal_for_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[LimitExceeded], waits: bool
) -> None:
    monkeypatch.setattr(rpc_service, "PAUSE_SECONDS", 1e6)
    async with served(tmp_path) as (_, service):
        refused = Call(service)
        await until(lambda: len(service.streams) == 1, "the stream does not begin")
        next(iter(service.streams)).refuse(error("refused"))
        with pytest.raises(error):
            await refused.serving
        after = Call(service)
        after.open(range(1))
        answered, _ = await asyncio.wait((asyncio.ensure_future(after.step(range(1), 5)),), timeout=1 if waits else 60)
        assert bool(answered) is not waits
        after.serving.cancel()
