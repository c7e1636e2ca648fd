"""Places are shared fairly by callers and by their connections."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from histospec.server.rpc.places import Places


class Call:
    """A call that wants a place, and has it until it is over."""

    def __init__(self, places: Places, caller: str, connection: str, order: list[str]) -> None:
        self._over = asyncio.Event()
        self.has = False
        self._order = order
        self.name = connection
        self.task = asyncio.ensure_future(self._run(places, caller, connection))

    async def _run(self, places: Places, caller: str, connection: str) -> None:
        async with places.place(caller, connection):
            self.has = True
            self._order.append(self.name)
            await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await self.task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_caller_with_many_calls_delays_no_other() -> None:
    """Also on a connection of its own it has no more places, and another one has a place at once."""
    places, order = Places(4, 3, 2), list[str]()
    flood = [Call(places, "a", f"a{number % 2}", order) for number in range(1000)]
    await settle()
    assert sorted(order) == ["a0", "a0", "a1"]
    other = Call(places, "b", "b0", order)
    await settle()
    assert other.has
    await other.end()
    for call in flood:
        await call.end()
    assert len(order) == 1001


@pytest.mark.asyncio
async def test_connections_and_callers_take_turns() -> None:
    places, order = Places(1, 1, 1), list[str]()
    calls = [Call(places, "a", "a0", order) for _ in range(3)]
    await settle()
    calls += [Call(places, "a", "a1", order), Call(places, "b", "b0", order), Call(places, "b", "b0", order)]
    await settle()
    for _ in calls:
        (now,) = [call for call in calls if call.has and not call.task.done()]
        await now.end()
        await settle()
    assert order == ["a0", "a0", "b0", "a1", "b0", "a0"]


@pytest.mark.asyncio
async def test_a_call_that_leaves_gives_its_place_or_its_turn_back() -> None:
    places, order = Places(1, 1, 1), list[str]()
    first, second, third = (Call(places, "a", f"a{number}", order) for number in range(3))
    await settle()
    assert places.wanted
    assert places.waiting("a") == 2
    second.task.cancel()
    await settle()
    assert places.waiting("a") == 1
    first._over.set()  # the third gets the place, and leaves before it runs
    await asyncio.sleep(0)
    third.task.cancel()
    await settle()
    assert not places.wanted
    async with AsyncExitStack() as stack:
        await asyncio.wait_for(stack.enter_async_context(places.place("b", "b0")), 10)


@pytest.mark.asyncio
async def test_a_caller_that_may_not_waits_until_it_may() -> None:
    allowed, order = {"b"}, list[str]()
    places = Places(2, 2, 2, lambda caller: caller in allowed)
    mine, other = Call(places, "a", "a0", order), Call(places, "b", "b0", order)
    await settle()
    assert order == ["b0"]
    allowed.add("a")
    places.give()
    await settle()
    assert mine.has
    await asyncio.gather(mine.end(), other.end())


@pytest.mark.asyncio
async def test_calls_that_all_end_at_once_leave_all_places() -> None:
    """Their connection has ended: some are cancelled while another one leaves its place to them."""
    places, order = Places(2, 2, 2), list[str]()
    calls = [Call(places, "a", "a0", order) for _ in range(10)]
    await settle()
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
    assert not places.wanted
    again = [Call(places, "a", "a0", order) for _ in range(2)]
    await settle()
    assert all(call.has for call in again)
    await asyncio.gather(*(call.end() for call in again))
