"""The end of a client's own event loop: its tasks end first, within a time limit."""

import asyncio
import threading

from histospec.client.transport.pump import Pump


async def nothing() -> None:
    pass


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
