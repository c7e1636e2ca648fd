"""Many single calls at a time, for trainers that ask about thousands of problems."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from histospec.client.calls import Call
from histospec.client.errors import Unavailable
from histospec.client.shard import ShardState

log = logging.getLogger("histospec.client")

T = TypeVar("T")

AT_A_TIME = 16
"""Calls on their way: most of one is waiting, for the server's disk or its answer."""


def carry_out(plan: Sequence[Sequence[Call[T]]], call: Callable[[Call[T]], T]) -> list[list[T] | None]:
    """Carries out a list of calls each; None for those whose shard cannot be reached.

    A shard that could not be reached once is asked no more, so that nobody waits for it thousands of times.

    Raises:
        HistoSpecError: what a call raises beside Unavailable; the calls that had not begun are then left out.
    """
    lost: set[ShardState] = set()

    def one(calls: Sequence[Call[T]]) -> list[T] | None:
        answers = []
        for item in calls:
            if item.shard in lost:
                return None
            try:
                answers.append(call(item))
            except Unavailable as error:
                if item.shard not in lost:
                    lost.add(item.shard)
                    log.warning("%s; it is not asked again for this batch", error)
                return None
        return answers

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="histospec") as pool:
        running = [pool.submit(one, calls) for calls in plan]
        try:
            return [future.result() for future in running]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
