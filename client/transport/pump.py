"""An asyncio loop without a thread of its own: it turns while a caller waits for it, and stands still otherwise.

The reason: a step has to be written from the worker's own thread. A helper thread would first have to get the GIL,
which the worker holds during its own bookkeeping. With a helper thread, at batch 256, sending and receiving cost the
worker 440-730 us instead of 130-180. gRPC's C++ threads need no GIL: they continue while the loop stands still.

One thread at a time drives the loop. Other threads that wait sleep until something happens, or until the driver leaves
and one of them must take over.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

IN_A_ROW = 32
"""Callbacks that run before the loop looks for input again."""


class Pump:
    """A private event loop, driven by the threads that wait for it."""

    def __init__(self) -> None:
        self._loop: _Loop | None = None
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._driven = False
        self._asleep = 0  # threads that wait for the driver

    def run(self, function: Callable[[], None], timeout: float) -> None:
        """Runs `function` on the loop, and the first turn of the tasks that it starts."""
        loop = self._start()
        ran = False

        def first() -> None:
            try:
                function()
            finally:
                loop.call_soon(last)  # after the first turn of every task that the function started

        def last() -> None:
            nonlocal ran
            ran = True
            self.wake()

        self.wait(lambda: ran, timeout, first)

    def wait(self, done: Callable[[], bool], timeout: float, first: Callable[[], None] | None = None) -> None:
        """Turns the loop, or lets another thread turn it, until done() is true or the time is up. Calls `first` first.

        Code that changes the result of done() must `wake` the pump.
        """
        loop = self._start()
        if asyncio._get_running_loop() is None:
            self._wait(loop, done, timeout, first)
            return
        # Two loops cannot run in one thread. The caller blocks its own loop either way, so this costs one more thread.
        helper = threading.Thread(
            target=self._wait, args=(loop, done, timeout, first), name="histospec-wait", daemon=True
        )
        helper.start()
        helper.join()

    def wake(self) -> None:
        """Makes all waiting threads check again. Called on the loop; the thread that drives it checks anyway."""
        if self._asleep:
            with self._free:
                self._free.notify_all()

    @property
    def used(self) -> bool:
        """Whether there is a loop."""
        return self._loop is not None

    def finish(self, last: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Runs `last` and every other task to its end, and closes the loop. The pump must not be used afterwards.

        Some tasks are gRPC's: each call has one that waits for the status, which arrives after the call was cancelled.
        If the loop is closed before that, gRPC keeps the call, its connection and eight threads until another loop
        turns, which may be never.
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
            self._asleep += 1
            while self._driven:
                self._free.wait()
            loop.close()

    def _start(self) -> "_Loop":
        # Only when needed: a process that forks before the first call must not share the loop's file descriptors.
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    loop = _Loop()
                    loop.set_exception_handler(_quiet)
                    self._loop = loop
        return self._loop

    def _wait(
        self,
        loop: "_Loop",
        done: Callable[[], bool],
        timeout: float,
        first: Callable[[], None] | None,
    ) -> None:
        until = time.monotonic() + timeout
        while not done() and (left := until - time.monotonic()) > 0:
            with self._lock:
                if self._driven:
                    if first is not None:
                        loop.call_soon_threadsafe(first)
                        first = None
                    self._asleep += 1  # before done(): a thread that changes its result later wakes this one
                    if not done():
                        self._free.wait(left)
                    self._asleep -= 1
                    continue
                self._driven = True
            try:
                now, first = first, None
                loop.turn(done, until, now)
            finally:
                with self._lock:
                    self._driven = False
                    if self._asleep:
                        self._free.notify_all()
        if first is not None:  # the time is up: the next driver calls it
            loop.call_soon_threadsafe(first)


class _Turning(Exception):  # noqa: N818 - not an error
    """Hides the exception that the caller is handling."""


class _Selector(selectors.DefaultSelector):
    """Waits until a time at the latest, so that the loop needs no timer for each wait."""

    until = 0.0
    """On the monotonic clock."""

    def select(self, timeout: float | None = None) -> Any:
        """See `selectors`."""
        left = max(0.0, self.until - time.monotonic())
        return super().select(left if timeout is None else min(timeout, left))


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that turns for a while, at less cost than `run_forever` and `stop`: a step turns it twice."""

    def __init__(self) -> None:
        self._bounded = _Selector()
        super().__init__(self._bounded)

    def turn(self, done: Callable[[], bool], until: float, first: Callable[[], None] | None) -> None:
        """Calls `first`, and runs callbacks until done() is true, or until a time on the monotonic clock.

        While gRPC's coroutines run, they keep the exception that the caller is handling, and with it the caller's
        frames, which hold the client. Raising an exception without frames around the loop prevents this.
        """
        asyncio._set_running_loop(self)
        try:
            raise _Turning
        except _Turning as turning:
            turning.__traceback__ = turning.__context__ = None
            try:
                if first is not None:
                    self._call(first)
                    self._bounded.until = 0.0  # takes what has arrived, and does not wait: done() may be true at once
                    self._run_once()  # type: ignore[attr-defined]
                self._bounded.until = until
                self._rounds(done, until)
            except BaseException as error:
                error.__context__ = None
                raise
        finally:
            asyncio._set_running_loop(None)

    def _rounds(self, done: Callable[[], bool], until: float) -> None:
        """Runs callbacks. Looks for input only if none is ready, and after IN_A_ROW of them.

        Uses private names of asyncio, which are the same in Python 3.10 to 3.14.
        """
        ready = self._ready  # type: ignore[attr-defined]
        while True:
            for _ in range(IN_A_ROW):
                if not ready:
                    break
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
            if done() or time.monotonic() >= until:
                return
            self._run_once()  # type: ignore[attr-defined]

    def _call(self, function: Callable[[], None]) -> None:
        """Calls a function at once, as the loop does with its callbacks."""
        try:
            function()
        except Exception as error:
            self.call_exception_handler({"message": f"Exception in {function!r}", "exception": error})


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports an error of this loop, but not what only looks like one.

    grpc.aio wakes every loop of the process for each event, also for events of closed loops, and all loops but one find
    nothing to read (issue 25364 of grpc). Tasks that still wait when the process exits are no errors, either.
    """
    if context.get("exception") is not None and "PollerCompletionQueue" not in context["message"]:
        loop.default_exception_handler(context)
