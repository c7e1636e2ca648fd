"""An asyncio loop without a thread: it turns while somebody waits for it, and stands still otherwise.

Why: a step has to be written from the worker's own thread. A helper thread would have to be given the GIL first, and
the worker, busy with its own bookkeeping, does not hand it over: measured at batch 256, sending and receiving then cost
the worker 440-730 us instead of 130-180. gRPC's C++ threads need no GIL: they work on while the loop stands still.

One thread at a time drives the loop. Others that wait meanwhile sleep until they are told that something happened, or
that the driver has left and one of them must take over.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any


class Pump:
    """A private event loop, driven by whoever waits for it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = threading.Condition()
        self._driven = False

    def run(self, function: Callable[[], None], timeout: float) -> None:
        """Runs `function` on the loop, and the first turn of the tasks that it starts."""
        loop = self._start()
        ran = threading.Event()

        def first() -> None:
            function()
            loop.call_soon(last)  # behind the first turn of every task that the function started

        def last() -> None:
            ran.set()
            self.wake()

        self.wait(ran.is_set, timeout, first)

    def wait(self, done: Callable[[], bool], timeout: float, first: Callable[[], None] | None = None) -> None:
        """Turns the loop, or lets another thread do so, until done() or the time is up; the loop calls `first` before.

        Whoever changes what done() says must `wake` the pump.
        """
        loop = self._start()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._wait(loop, done, timeout, first)
            return
        # Two loops cannot run in one thread. The caller blocks its own loop either way; this costs it one thread more.
        helper = threading.Thread(
            target=self._wait, args=(loop, done, timeout, first), name="histospec-wait", daemon=True
        )
        helper.start()
        helper.join()

    def wake(self) -> None:
        """Makes all who wait look again. Called on the loop."""
        self._start().stop()
        with self._free:
            self._free.notify_all()

    @property
    def used(self) -> bool:
        """Whether there is a loop."""
        return self._loop is not None

    def finish(self, last: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Runs `last` and every other task to its end, and closes the loop. The pump may not be used any more.

        Some tasks are gRPC's: each call has one that waits for the status, which arrives after the call was cancelled.
        A loop that is closed before never hears of it, and gRPC keeps the call, its connection and eight threads until
        another loop turns, which may be never.
        """
        if self._loop is None:
            return
        loop = self._loop
        tasks: list[asyncio.Task[None]] = []

        async def everything() -> None:
            await last()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

        def first() -> None:
            tasks.append(loop.create_task(everything()))
            tasks[0].add_done_callback(lambda _: self.wake())

        self.wait(lambda: bool(tasks) and tasks[0].done(), timeout, first)
        with self._free:
            while self._driven:
                self._free.wait()
            loop.close()

    def _start(self) -> asyncio.AbstractEventLoop:
        # Not before it is needed: a process that forks in between must not share the loop's file descriptors.
        if self._loop is None:
            with self._free:
                if self._loop is None:
                    loop = asyncio.new_event_loop()
                    loop.set_exception_handler(_quiet)
                    self._loop = loop
        return self._loop

    def _wait(
        self,
        loop: asyncio.AbstractEventLoop,
        done: Callable[[], bool],
        timeout: float,
        first: Callable[[], None] | None,
    ) -> None:
        until = time.monotonic() + timeout
        while not done() and (left := until - time.monotonic()) > 0:
            with self._free:
                if self._driven:
                    if first is not None:
                        loop.call_soon_threadsafe(first)
                        first = None
                    if not done():
                        self._free.wait(left)
                    continue
                self._driven = True
            try:
                if first is not None:  # nobody else drives: there is no loop to be woken, which costs system calls
                    loop.call_soon(first)
                    first = None
                alarm = loop.call_later(left, loop.stop)
                _turn(loop)
                alarm.cancel()
            finally:
                with self._free:
                    self._driven = False
                    self._free.notify_all()
        if first is not None:  # no time to drive the loop: whoever drives it next
            loop.call_soon_threadsafe(first)


class _Turning(Exception):  # noqa: N818 - not an error
    """Stands before whatever exception the caller handles at the moment."""


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop.

    gRPC's coroutines keep the exception that is being handled while they run, and with it the frames of the caller,
    which hold the client: so they are given one without frames.
    """
    try:
        raise _Turning
    except _Turning as turning:
        turning.__traceback__ = turning.__context__ = None
        try:
            loop.run_forever()
        except BaseException as error:
            error.__context__ = None
            raise


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drops what only looks like an error on this loop.

    grpc.aio wakes every loop of the process for an event, also for those of loops that are closed, and all but one find
    nothing to read (issue 25364 of grpc); tasks that still wait when the process exits have nobody left to wait for.
    """
    if context.get("exception") is not None and "PollerCompletionQueue" not in context["message"]:
        loop.default_exception_handler(context)
