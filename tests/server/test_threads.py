"""Threads for the work of callers: one kind of work does not delay another."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from histospec.server.rpc import wire
from histospec.server.rpc.slices import MANY
from histospec.server.threads import THREADS, Threads
from histospec.v1 import draft_pb2 as pb
from tests.support.draft_calls import Call, served
from tests.support.wires import i32, u64


@pytest.mark.asyncio
async def test_one_kind_of_work_delays_no_other() -> None:
    threads, over = Threads(), threading.Event()
    try:
        for busy in THREADS:
            flood = [asyncio.ensure_future(threads.run(busy, over.wait, 60)) for _ in range(2 * THREADS[busy])]
            for kind in THREADS:
                if kind != busy:
                    assert await asyncio.wait_for(threads.run(kind, int, "7"), 60) == 7
            assert not any(work.done() for work in flood)
            over.set()
            assert await asyncio.gather(*flood) == [True] * len(flood)
            over.clear()
    finally:
        over.set()
        threads.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [MANY, MANY + 1])
async def test_many_parts_are_checked_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """They take milliseconds, and a message of a megabyte has tens of thousands."""
    checked: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        check = getattr(wire, name)

        def watched(*args: Any) -> Any:
            checked.append((name, threading.current_thread() is not threading.main_thread()))
            return check(*args)

        monkeypatch.setattr(wire, name, watched)

    watch("ingest")
    watch("message")
    async with served(tmp_path) as (_, service):
        call = Call(service)
        responses = [pb.Response(tokens=i32([1]))] * count
        request = pb.IngestRequest(namespace="run", prompt=i32([1]), responses=responses)
        answer = await service.Ingest(request, cast(Any, call))
        assert answer.responses == count
        call.open(range(count))
        step = pb.Step(sessions=u64([]), positions=b"", lengths=b"", tokens=b"")
        call.send(pb.DraftRequest(sequence=2, step=step, closes=[pb.CloseSession(session=s) for s in range(count)]))
        await call.answer()
        call.end()
        await call.serving
    many = count > MANY
    assert checked == [("ingest", many), ("message", many), ("message", many)]
