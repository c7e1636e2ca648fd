"""A client's own event loop: the threads that wait turn it; at the end its tasks end first, within a time limit."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from histospec.client.transport.pump import Pump
from histospec.client.transport.threads import uninterrupted
from tests.support.waiting import eventually


async def nothing() -> None:
    pass


def pump_and_loop() -> tuple[Pump, asyncio.AbstractEventLoop]:
    pump, loops = Pump(), list[asyncio.AbstractEventLoop]()
    pump.run(lambda: loops.append(asyncio.get_running_loop()), 60)
    return pump, loops[0]


def test_a_loop_hears_of_everything_before_it_is_closed() -> None:
    """Like gRPC's tasks, this one waits for a report of another thread after the last task of the client has ended."""
    pump = Pump()
    ended: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def status() -> None:
        loop = asyncio.get_running_loop()
        reported = loop.create_future()
        threading.Timer(0.2, loop.call_soon_threadsafe, (reported.set_result, None)).start()
        await reported
        tasks.append(loop.create_task(further()))

    async def further() -> None:
        await asyncio.sleep(0)
        ended.append("all of it")

    pump.run(lambda: tasks.append(asyncio.get_running_loop().create_task(status())), 60)
    pump.finish(nothing, 60)
    assert ended == ["all of it"]
    assert all(task.done() and not task.cancelled() for task in tasks)
    assert tasks[0].get_loop().is_closed()


def test_a_loop_is_closed_in_time_all_the_same() -> None:
    pump = Pump()
    tasks: list[asyncio.Task[bool]] = []

    async def waits() -> bool:
        return await asyncio.Event().wait()

    pump.run(lambda: tasks.append(asyncio.get_running_loop().create_task(waits())), 60)
    tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
    pump.finish(nothing, 0.1)
    assert tasks[0].get_loop().is_closed()
    assert not tasks[0].done()


def test_a_message_takes_what_has_arrived_even_if_nobody_waits() -> None:
    """A client that only sends still connects: each turn reads the socket on which gRPC's threads report."""
    pump = Pump()
    theirs, ours = socket.socketpair()
    got: list[bytes] = []

    def listen() -> None:
        asyncio.get_running_loop().add_reader(ours, lambda: got.append(ours.recv(16)))

    with theirs, ours:
        pump.run(listen, 60)
        theirs.send(b"report")
        pump.run(lambda: None, 60)
        assert got == [b"report"]
        pump.finish(nothing, 60)


def test_a_thread_that_waits_is_woken_by_the_thread_that_drives() -> None:
    pump, loop = pump_and_loop()
    arrived, over, driving = threading.Event(), threading.Event(), threading.Event()
    driver = threading.Thread(target=pump.wait, args=(over.is_set, 60, driving.set))
    waiter = threading.Thread(target=pump.wait, args=(arrived.is_set, 60))
    driver.start()
    assert driving.wait(60)
    waiter.start()
    eventually(lambda: pump._bells)

    def change(event: threading.Event) -> None:
        event.set()
        pump.wake()

    loop.call_soon_threadsafe(change, arrived)
    waiter.join(30)
    assert not waiter.is_alive()
    assert driver.is_alive()
    loop.call_soon_threadsafe(change, over)
    driver.join(30)
    assert not driver.is_alive()
    pump.finish(nothing, 60)


def test_a_wait_ends_in_time_and_an_error_of_its_function_is_logged() -> None:
    pump, loop = pump_and_loop()
    pump.wait(lambda: False, 0.05)
    logged: list[object] = []
    loop.set_exception_handler(lambda loop, context: logged.append(context["exception"]))
    wrong = ValueError("wrong")

    def fail() -> None:
        raise wrong

    pump.wait(lambda: bool(logged), 60, fail)
    assert logged == [wrong]
    pump.finish(nothing, 60)


def test_a_function_on_the_loop_runs_in_another_thread() -> None:
    """Signals interrupt the main thread alone. Its errors are those of the caller."""
    pump, found = Pump(), []

    def first() -> None:
        loop = asyncio.get_running_loop()
        found.append(uninterrupted(lambda: (asyncio.get_running_loop() is loop, threading.current_thread())))
        with pytest.raises(ValueError, match="three"):
            uninterrupted(lambda: int("three"))

    pump.run(first, 60)
    ((same, thread),) = found
    assert same
    assert thread is not threading.current_thread()
    pump.finish(nothing, 60)


def test_a_loop_whose_making_was_interrupted_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = asyncio.selector_events.BaseSelectorEventLoop
    make: Any = kind._make_self_pipe  # type: ignore[attr-defined]

    pump, ends = Pump(), list[socket.socket]()

    def interrupted(loop: Any) -> None:
        make(loop)
        ends.extend((loop._ssock, loop._csock))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "_make_self_pipe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pump.wait(lambda: False, 60)
    assert [end.fileno() for end in ends] == [-1, -1]
    assert not pump.used
    pump.wait(lambda: pump.used, 60)
    pump.finish(nothing, 60)
