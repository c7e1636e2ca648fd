"""Callers at one time share a computation that started after they asked."""

import asyncio

import pytest

from histospec.server.observability.web import OnceASecond


class Numbers:
    """Computes 1, 2, 3, ... each when released."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Semaphore(0)

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.go.acquire()
        return number


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_all_that_ask_at_a_time_share_one_computation() -> None:
    numbers = Numbers()
    once = OnceASecond(numbers, seconds=0)
    asking = [asyncio.ensure_future(once()) for _ in range(100)]
    numbers.go.release()
    assert await asyncio.gather(*asking) == [1] * 100


@pytest.mark.asyncio
async def test_who_asks_during_a_computation_shares_the_next() -> None:
    """A scrape includes everything counted before it."""
    numbers = Numbers()
    once = OnceASecond(numbers, seconds=0)
    first = asyncio.ensure_future(once())
    while not numbers.begun:
        await asyncio.sleep(0)
    late = [asyncio.ensure_future(once()) for _ in range(3)]
    await settled()
    assert numbers.begun == 1
    numbers.go.release()
    numbers.go.release()
    assert await first == 1
    assert await asyncio.gather(*late) == [2] * 3


@pytest.mark.asyncio
async def test_the_next_computation_waits_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    numbers = Numbers()
    once = OnceASecond(numbers, seconds=1000.0)
    for _ in range(3):
        numbers.go.release()
        await once()
    assert slept[0] < 0
    assert all(990 < seconds <= 1000 for seconds in slept[1:])
    assert len(slept) == 3


@pytest.mark.asyncio
async def test_who_leaves_takes_nothing_from_the_others_and_errors_reach_all() -> None:
    async def fail() -> None:
        raise ValueError("no")

    numbers = Numbers()
    once = OnceASecond(numbers, seconds=0)
    leaving, staying = asyncio.ensure_future(once()), asyncio.ensure_future(once())
    await settled()
    leaving.cancel()
    numbers.go.release()
    assert await staying == 1
    failing = OnceASecond(fail, seconds=0)
    outcomes = await asyncio.gather(failing(), failing(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ValueError] * 2
