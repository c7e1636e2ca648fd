"""Threads for the work of callers: one kind of work does not delay another."""

import asyncio
import threading

import pytest

from histospec.server.threads import THREADS, Threads


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
