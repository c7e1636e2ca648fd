"""An asyncio loop without a thread of its own: it turns while a caller waits for it, and stands still otherwise.

The reason: a step has to be written from the worker's own thread. A helper thread would first have to get the GIL,
which the worker holds during its own bookkeeping. With a helper thread, at batch 256, sending and receiving cost the
worker 440-730 us instead of 130-180. gRPC's C++ threads need no GIL: they continue while the loop stands still.

One thread at a time drives the loop. Other threads that wait sleep until something happens, or until the driver leaves
and one of them must take over.

A signal handler may raise KeyboardInterrupt between any two bytecodes of the main thread, so also while that thread
drives the loop. What such a turn was doing in asyncio, in gRPC or in a task is then lost. Therefore the pump gives up a
loop whose turn did not end, and the next driver makes a new one. The pump itself stays usable: each of its own changes
is one bytecode, or is undone by a `finally` that covers it, or is under a lock that `with` takes and releases.
(A `threading.Condition` is unsafe here: an interrupt may leave its lock taken, or release that of another thread.)
"""

import _thread
import asyncio
import contextlib
import logging
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("histospec.client")

IN_A_ROW = 32
"""Callbacks that run before the loop looks for input again."""
LONGEST_SLEEP = 0.1
"""Seconds after which a sleeping thread checks again: a driver that an interrupt ends may wake no other thread."""

_NOWHERE = object()


class Pump:
    """A private event loop, driven by the threads that wait for it."""

    def __init__(self) -> None:
        self.give_up: Callable[[], None] = lambda: None
        """Called by the next driver after an interrupt ended a turn, before it makes a new loop."""
        self._loop: _Loop | None = None
        self._lost: _Loop | None = None  # a loop that is to be given up
        self._lock = threading.Lock()
        self._refused = False  # whether the last try to make a loop failed
        self._driver: object = None  # stands for the thread that turns the loop
        self._bells: set[queue.SimpleQueue[None]] = set()  # of the threads that sleep

    def run(self, function: Callable[[], None], timeout: float, take: bool = True) -> None:
        """Runs `function` on the loop, and the first turn of the tasks that it starts.

        `take`: whether to take what has arrived, too; a caller that waits next does so then.
        """
        ran = False

        def first() -> None:
            try:
                function()
            finally:
                # After the first turn of every task that the function started.
                asyncio.get_running_loop().call_soon(last)

        def last() -> None:
            nonlocal ran
            ran = True
            self.wake()

        self.wait(lambda: ran, timeout, first, take)

    def wait(
        self, done: Callable[[], bool], timeout: float, first: Callable[[], None] | None = None, take: bool = False
    ) -> None:
        """Turns the loop, or lets another thread turn it, until done() is true or the time is up. Calls `first` first.

        `take`: whether to take what has arrived even if done() is true by then.

        Code that changes the result of done() must `wake` the pump. If an interrupt ends a turn in another thread,
        `first` is called again, on the new loop.
        """
        if asyncio._get_running_loop() is None:
            self._wait(done, timeout, first, take)
            return
        # Two loops cannot run in one thread. The caller blocks its own loop either way, so this costs one more thread.
        over: queue.SimpleQueue[None] = queue.SimpleQueue()

        def helper() -> None:
            try:
                self._wait(done, timeout, first, take)
            finally:
                over.put(None)

        _thread.start_new_thread(helper, ())
        over.get()

    def wake(self) -> None:
        """Makes all waiting threads check again. Called on the loop; the thread that drives it checks anyway."""
        if self._bells:
            for bell in list(self._bells):
                bell.put(None)

    @property
    def used(self) -> bool:
        """Whether there is a loop."""
        return self._loop is not None or self._lost is not None

    def finish(self, last: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Runs `last` and every other task to its end, and closes the loop. May be called again after an interrupt.

        Some tasks are gRPC's: each call has one that waits for the status, which arrives after the call was cancelled.
        If the loop is closed before that, gRPC keeps the call, its connection and eight threads until another loop
        turns, which may be never.
        """
        if not self.used:
            return
        tasks: list[asyncio.Task[None]] = []

        async def everything() -> None:
            await last()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

        def first() -> None:
            tasks.append(asyncio.get_running_loop().create_task(everything()))
            tasks[-1].add_done_callback(lambda _: self.wake())

        self.wait(lambda: bool(tasks) and tasks[-1].done(), timeout, first)
        me = object()
        try:
            while not self._drives(me):
                self._sleep(LONGEST_SLEEP, lambda: False)
            if self._loop is not None:
                self._loop.close()
                self._loop = None
        finally:
            if self._driver is me:
                self._driver = None
                self.wake()

    def _wait(self, done: Callable[[], bool], timeout: float, first: Callable[[], None] | None, take: bool) -> None:
        until = time.monotonic() + timeout
        me = object()
        try:
            # Inside the `try`: of a jump back to a loop's begin, CPython counts an interrupt as of the line before it.
            asked: object = _NOWHERE  # the loop that `first` was given to
            while not done() and (left := until - time.monotonic()) > 0:
                if self._drives(me):
                    try:
                        loop = self._sound_loop()
                    except OSError as error:  # no descriptor is left: as if nothing answered
                        self._refuse(error)
                        return
                    now = None if asked is loop else first
                    asked = loop
                    loop.turn(done, until, now, take)
                    continue
                if asked is not self._loop:
                    asked = self._ask(first)
                self._sleep(left, done)
        finally:
            if self._driver is me:  # not in a function: an interrupt might come before its first line
                self._driver = None
                self.wake()
        if asked is _NOWHERE:  # the time is up: the next driver calls it
            self._ask(first)

    def _drives(self, me: object) -> bool:
        """Returns whether the caller turns the loop; makes it do so if no thread does."""
        with self._lock:
            if self._driver is None:
                self._driver = me
        return self._driver is me

    def _sleep(self, seconds: float, done: Callable[[], bool]) -> None:
        """Sleeps until another thread wakes this one, done() is true, or no thread turns the loop."""
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._bells.add(bell)
            if self._driver is not None and not done():  # after the bell is there: what changes later rings it
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=min(seconds, LONGEST_SLEEP))
        finally:
            self._bells.discard(bell)

    def _ask(self, function: Callable[[], None] | None) -> object:
        """Has the thread that drives call this function. Returns the loop."""
        with self._lock:
            loop = self._loop
            if loop is not None and function is not None:
                loop.call_soon_threadsafe(function)
        return loop

    def _sound_loop(self) -> "_Loop":
        """Returns the loop; a new one if there is none or an interrupt ended its last turn. Called by the driver."""
        # Only when needed: a process that forks before the first call must not share the loop's file descriptors.
        if self._loop is not None and self._loop.turning:
            with self._lock:
                self._lost, self._loop = self._loop, None
        if self._lost is not None:
            self.give_up()
            self._lost.close()
            self._lost = None
        if self._loop is None:
            loop = _Loop(_Selector())
            loop.set_exception_handler(_quiet)
            self._loop, self._refused = loop, False
            self.wake()  # others may have a function for it
        return self._loop

    def _refuse(self, error: OSError) -> None:
        if not self._refused:
            self._refused = True
            log.warning(
                "HistoSpec: no drafts, because this process cannot have an event loop: %s", error.strerror or error
            )


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

    _closed = True
    """For asyncio, until it has made the loop: there is nothing to close."""

    def __init__(self, bounded: _Selector) -> None:
        self.turning = False
        """Whether a turn has begun and did not end. If no thread drives the loop, an interrupt has ended it."""
        self._interrupt: BaseException | None = None
        self._hook = sys.unraisablehook
        self._bounded = bounded
        try:
            super().__init__(bounded)
        except BaseException:  # an interrupt, or a descriptor was left for the selector and none for the loop's sockets
            self.close()
            raise

    def close(self) -> None:
        """Closes the loop, also one that was not made whole. May be called again after an interrupt, unlike asyncio's.

        Uses private names of asyncio, as `_rounds` does.
        """
        for name in ("_ssock", "_csock"):
            if (end := getattr(self, name, None)) is not None:
                end.close()
        self._closed = True  # before a channel of gRPC may be freed, which takes its reader from all loops
        self._bounded.close()
        for name in ("_ready", "_scheduled"):
            if (handles := getattr(self, name, None)) is not None:
                handles.clear()

    def turn(self, done: Callable[[], bool], until: float, first: Callable[[], None] | None, take: bool) -> None:
        """Calls `first`, and runs callbacks until done() is true, or until a time on the monotonic clock.

        `take`: see `Pump.wait`.

        While gRPC's coroutines run, they keep the exception that the caller is handling, and with it the caller's
        frames, which hold the client. Raising an exception without frames around the loop prevents this.
        """
        self.turning = True
        self._hook = sys.unraisablehook
        try:
            if threading.current_thread() is threading.main_thread():  # the only one that is interrupted
                sys.unraisablehook = self._ignored
            asyncio._set_running_loop(self)
            raise _Turning
        except _Turning as turning:
            turning.__traceback__ = turning.__context__ = None
            try:
                if first is not None:
                    self._call(first)
                if take:
                    self._bounded.until = 0.0  # does not wait: done() may be true after this
                    self._run_once()  # type: ignore[attr-defined]
                self._bounded.until = until
                self._rounds(done, until)
            except BaseException as error:
                error.__context__ = None
                raise
        finally:
            if sys.unraisablehook == self._ignored:
                sys.unraisablehook = self._hook
            asyncio._set_running_loop(None)
        if self._interrupt is not None:
            raise self._interrupt
        self.turning = False

    def _ignored(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Takes an exception that C code ignores. gRPC does so where it calls asyncio; the turn raises an interrupt."""
        if issubclass(unraisable.exc_type, Exception):
            self._hook(unraisable)
        else:
            self._interrupt = unraisable.exc_value or unraisable.exc_type()

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
            if self._interrupt is not None or done() or time.monotonic() >= until:
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
