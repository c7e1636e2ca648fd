"""Makes many single calls in parallel, for trainers that ask about thousands of problems; for both clients."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from histospec.client.core.shard import ShardState
from histospec.client.errors import Unavailable
from histospec.client.transport.calls import Call

log = logging.getLogger("histospec.client")

T = TypeVar("T")

AT_A_TIME = 16
"""Calls in parallel: a call mostly waits for the server's disk or for the answer."""


class _Lost:
    """Shards that could not be reached. The batch asks them no more: each further call would wait for its timeout."""

    def __init__(self) -> None:
        self._shards: set[ShardState] = set()

    def __contains__(self, shard: ShardState) -> bool:
        return shard in self._shards

    def add(self, shard: ShardState, error: Unavailable) -> None:
        if shard not in self._shards:
            self._shards.add(shard)
            log.warning("HistoSpec: %s; it is not asked again for this batch", error)


def carry_out(plan: Sequence[Sequence[Call[T]]], call: Callable[[Call[T]], T]) -> list[list[T] | None]:
    """Carries out a list of calls for each problem. Returns their results; None if its shard cannot be reached.

    Raises:
        HistoSpecError: an error of a call other than Unavailable; calls that had not begun are then left out.
    """
    lost = _Lost()

    def one(calls: Sequence[Call[T]]) -> list[T] | None:
        answers = []
        for item in calls:
            if item.shard in lost:
                return None
            try:
                answers.append(call(item))
            except Unavailable as error:
                lost.add(item.shard, error)
                return None
        return answers

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="histospec") as pool:
        running = [pool.submit(one, calls) for calls in plan]
        try:
            return [future.result() for future in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


async def carry_out_async(
    plan: Sequence[Sequence[Call[T]]], call: Callable[[Call[T]], Awaitable[T]]
) -> list[list[T] | None]:
    """Like `carry_out`, for asyncio."""
    lost = _Lost()
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(calls: Sequence[Call[T]]) -> list[T] | None:
        answers = []
        async with gate:
            for item in calls:
                if item.shard in lost:
                    return None
                try:
                    answers.append(await call(item))
                except Unavailable as error:
                    lost.add(item.shard, error)
                    return None
        return answers

    running = [asyncio.ensure_future(one(calls)) for calls in plan]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
