"""Everything that a client has open: its streams, and the channels of its single calls; and how single calls are made.

The two faces do the same, one in the threads of its callers, the other on their loop. Neither refers to the client, so
that a client can be garbage-collected. The collector runs in any thread, while any lock may be held and any loop may
turn. It therefore closes nothing itself: the loop of the client does, or a thread for this alone.
"""

import _thread
import asyncio
import concurrent.futures
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from histospec.client import quiet_grpc
from histospec.client.config import Endpoint
from histospec.client.core.core import Core
from histospec.client.core.shard import Shard
from histospec.client.errors import ConfigurationError, HistoSpecError, Unavailable, WrongLoop, from_status
from histospec.client.transport import at_exit, calls
from histospec.client.transport.calls import Call
from histospec.client.transport.channel import metadata, open_channel
from histospec.client.transport.keeping import Batch, Group, Keeper
from histospec.client.transport.pump import Pump
from histospec.client.transport.stream import Streams
from histospec.client.values import Inspection
from histospec.v1 import draft_pb2_grpc as rpc

log = logging.getLogger("histospec.client")

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

AT_A_TIME = 16
"""Calls in parallel: a call mostly waits for the server's disk or for the answer."""

_ending: "set[asyncio.Task[None]]" = set()
"""Tasks that end clients; a loop keeps only weak references to its tasks."""


class _Connections:
    """What both faces have in common."""

    def __init__(self, core: Core, streams: Streams) -> None:
        self._core = core
        self._streams = streams
        self._channels: dict[Endpoint, Any] = {}
        self._keeper = Keeper(core)
        self._lock = threading.Lock()
        self._ended = False
        """Whether single calls raise Unavailable."""
        self._closed = False
        """Whether all connections are closed."""
        self._reported = False
        """Whether the log says what is lost at the end."""
        at_exit.enter(self)

    def _open(self, kind: ModuleType, call: Call[Any]) -> tuple[Any, Any]:
        """Returns the channel for a call, and its method; `kind` is grpc or grpc.aio."""
        endpoint = call.endpoint
        with self._lock:
            channel = self._channels.get(endpoint)
            if self._ended or self._core.closed:
                raise Unavailable(f"{call.what}: this client is shut down")
            if channel is None:
                channel = self._channels[endpoint] = open_channel(kind, endpoint, self._core.config)
        return channel, getattr(rpc.DraftServiceStub(channel), call.method)

    def _smaller(self, call: Call[T], channel: Any, error: grpc.RpcError) -> list[Call[T]]:
        """Returns a failed call in smaller calls. Raises its error if its size is not the reason."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            # With this channel, calls would fail until gRPC's back-off ends; a new channel connects at once.
            with self._lock:
                if self._channels.get(call.endpoint) is channel:
                    del self._channels[call.endpoint]
            self._core.looked_at = -math.inf  # the shard may have moved
        details = error.details()
        pieces = calls.smaller(call, details or "", self._core.config.limits)
        if not pieces:
            raise from_status(error.code(), details, call.what) from error
        return pieces

    def _greeted(self, shard: Shard, answer: Inspection) -> Inspection | None:
        """Returns the answer of a shard to `greet`; None if it does not let this client read."""
        if "read" in answer.rights:
            self._core.answered(shard)
            return answer
        details = f"its token has no right to read in namespace {self._core.config.namespace!r}"
        self._core.unreachable(shard, grpc.StatusCode.PERMISSION_DENIED, details)
        return None

    def _not_greeted(self, shard: Shard, error: HistoSpecError) -> None:
        """Has the core log why a shard did not answer `greet`."""
        if isinstance(error, ConfigurationError):
            raise error
        code, details = grpc.StatusCode.UNAVAILABLE, str(error)
        if isinstance(error.__cause__, grpc.RpcError):
            reported: Any = error.__cause__
            code, details = reported.code(), reported.details() or ""
        self._core.unreachable(shard, code, details)

    def at_exit(self) -> None:
        """Sends finished responses when the process ends, and logs which are lost."""
        raise NotImplementedError

    def _report(self) -> None:
        """Logs which responses are lost, because the client ends. May be called again."""
        with self._lock:  # a thread may end a client that was dropped while the process ends
            reported, self._reported = self._reported, True
        if reported:
            return
        self._core.report_end()
        if waiting := self._core.unacknowledged:
            lost = "1 is lost" if waiting == 1 else f"{waiting} are lost"
            log.warning("HistoSpec: the client ends before the server acknowledged its finished responses: %s", lost)


class BlockingConnections(_Connections):
    """The connections of a blocking client, which makes single calls in threads of its own.

    The caller only waits, because it may be the main thread, in which a signal handler may raise KeyboardInterrupt. In
    the middle of gRPC's code this leaves locks taken, and all later calls of the channel wait for them.
    """

    def __init__(self, core: Core, streams: Streams, pump: Pump) -> None:
        super().__init__(core, streams)
        self._pump = pump
        self._end_lock = threading.Lock()

    def do(self, build: Callable[Concatenate[Core, P], list[Call[T]]], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Finds the shards, then makes the calls that `build` returns. Returns their results."""
        self.find()
        plan = build(self._core, *args, **kwargs)
        return _elsewhere(lambda: [self.one(call) for call in plan])

    def find(self, timeout: float | None = None) -> None:
        """Waits until the client knows the shards; while it steps, it always knows them."""
        quiet_grpc.refuse_after_fork()
        seconds = self._core.config.timeouts.call if timeout is None else timeout
        if not (self._streams.found() or self._ended):
            self._pump.run(self._streams.discover, seconds)
            self._pump.wait(self._streams.found, seconds)

    def one(self, call: Call[T]) -> T:
        """Makes one call. Not for the main thread."""
        channel, method = self._open(grpc, call)
        try:
            return call.finish(method(call.request, timeout=call.timeout, metadata=metadata(self._core.config)))
        except grpc.RpcError as error:
            pieces = self._smaller(call, channel, error)
        return call.join([self.one(piece) for piece in pieces])

    def many(self, plan: Sequence[Sequence[Call[T]]]) -> list[list[T] | None]:
        """Makes a list of calls for each problem. Returns their results; None if its shard cannot be reached.

        Raises:
            HistoSpecError: an error of a call other than Unavailable; calls that had not begun are then left out.
        """
        lost: set[Shard] = set()

        def one(calls: Sequence[Call[T]]) -> list[T] | None:
            answers = []
            for call in calls:
                if call.shard in lost:
                    return None
                try:
                    answers.append(self.one(call))
                except Unavailable as error:
                    _skip(lost, call.shard, error)
                    return None
            return answers

        return _side_by_side(one, plan)

    def keep(self, batch: Batch) -> list[bool]:
        """Stores a batch. Returns for each of its responses whether it is stored. Never raises."""

        def one(group: Group) -> None:
            try:
                stored = sum(self.one(call) for call in self._keeper.calls(batch, group))
                self._keeper.keep(batch, group, stored)
            except Exception as error:
                self._keeper.lose(batch, group, error)

        try:
            self.find(self._core.config.timeouts.keep)
            _side_by_side(one, batch.groups)
            self._keeper.report(batch)
        except Exception as error:
            _not_kept(error)
        return batch.stored

    def greet(self, timeout: float) -> list[Inspection]:
        """Asks every shard for its state when a worker starts. Returns the answers of those that let this client read.

        The core logs why the others do not answer. All are asked in parallel, each for at most `timeout` seconds.

        Raises:
            ConfigurationError: a token file or certificate cannot be read.
        """
        self.find(timeout)

        def one(call: Call[Inspection]) -> Inspection | None:
            try:
                return self._greeted(call.shard, self.one(call))
            except HistoSpecError as error:
                self._not_greeted(call.shard, error)
                return None

        answers = _side_by_side(one, calls.inspect(self._core, timeout))
        return [answer for answer in answers if answer is not None]

    def flush(self, seconds: float) -> None:
        """Sends what waits, and waits until the shards have acknowledged the commits."""
        until = time.monotonic() + seconds
        while touched := self._core.flush():
            self._pump.run(partial(self._streams.kick, touched), until - time.monotonic())
            self._pump.wait(partial(self._core.settled, touched), until - time.monotonic())
            if time.monotonic() >= until:
                self._core.overdue(touched)
                return

    def send_last(self) -> None:
        """Sends finished responses before the client or its process ends, and reports which are lost."""
        self.flush(self._core.config.timeouts.shutdown)
        self._report()

    def at_exit(self) -> None:
        """Sends finished responses when the process ends."""
        if self._core.unacknowledged:
            self.flush(self._core.config.timeouts.shutdown)
        self._report()

    def begin_end(self) -> bool:
        """Ends single calls: later ones raise Unavailable. Returns whether connections are to be closed."""
        self._ended = True
        return not self._closed

    def end(self) -> None:
        """Closes the connections. May be called again. An interrupt ends the wait for it, but not the work."""
        _elsewhere(self._end)

    def _end(self) -> None:
        with self._end_lock:
            if self._closed:
                return
            self._core.stop()
            self._pump.finish(self._streams.end_all, self._core.config.timeouts.shutdown)
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            self._closed = True
            at_exit.leave(self)

    def dropped(self) -> None:
        """Sends finished responses and closes the connections after the client was collected, in a thread."""
        if quiet_grpc.forked() or not (self._channels or self._pump.used or self._core.unacknowledged):
            at_exit.leave(self)
            return
        try:
            _thread.start_new_thread(self._end_quietly, ())
        except RuntimeError:  # the interpreter shuts down, and `at_exit` sends them
            log.debug("HistoSpec: a client is left open at exit")

    def _end_quietly(self) -> None:
        try:
            self.send_last()
            self._end()
        except Exception:
            log.debug("HistoSpec: a client that was dropped could not be closed", exc_info=True)


class LoopConnections(_Connections):
    """The connections of an asyncio client. `until` waits for a condition, at most a number of seconds."""

    def __init__(
        self, core: Core, streams: Streams, until: Callable[[Callable[[], bool], float], Awaitable[None]]
    ) -> None:
        super().__init__(core, streams)
        self._until = until

    async def do(
        self, build: Callable[Concatenate[Core, P], list[Call[T]]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """See BlockingConnections."""
        await self.find()
        return [await self.one(call) for call in build(self._core, *args, **kwargs)]

    async def find(self, timeout: float | None = None) -> None:
        """See BlockingConnections. Raises WrongLoop."""
        quiet_grpc.refuse_after_fork()
        self._streams.join()
        if not (self._streams.found() or self._core.closed):
            self._streams.discover()
            await self._until(self._streams.found, self._core.config.timeouts.call if timeout is None else timeout)

    async def one(self, call: Call[T]) -> T:
        """See BlockingConnections."""
        channel, method = self._open(grpc.aio, call)
        try:
            return call.finish(await method(call.request, timeout=call.timeout, metadata=metadata(self._core.config)))
        except grpc.RpcError as error:
            pieces = self._smaller(call, channel, error)
        return call.join([await self.one(piece) for piece in pieces])

    async def many(self, plan: Sequence[Sequence[Call[T]]]) -> list[list[T] | None]:
        """See BlockingConnections."""
        lost: set[Shard] = set()
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(calls: Sequence[Call[T]]) -> list[T] | None:
            answers = []
            async with gate:
                for call in calls:
                    if call.shard in lost:
                        return None
                    try:
                        answers.append(await self.one(call))
                    except Unavailable as error:
                        _skip(lost, call.shard, error)
                        return None
            return answers

        running = [asyncio.ensure_future(one(calls)) for calls in plan]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()

    async def keep(self, batch: Batch) -> list[bool]:
        """See BlockingConnections. Raises WrongLoop."""
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(group: Group) -> None:
            async with gate:
                try:
                    stored = sum([await self.one(call) for call in self._keeper.calls(batch, group)])
                    self._keeper.keep(batch, group, stored)
                except Exception as error:
                    self._keeper.lose(batch, group, error)

        try:
            await self.find(self._core.config.timeouts.keep)
            await asyncio.gather(*map(one, batch.groups))
            self._keeper.report(batch)
        except WrongLoop:
            raise
        except Exception as error:
            _not_kept(error)
        return batch.stored

    async def greet(self, timeout: float) -> list[Inspection]:
        """See BlockingConnections."""
        await self.find(timeout)

        async def one(call: Call[Inspection]) -> Inspection | None:
            try:
                return self._greeted(call.shard, await self.one(call))
            except HistoSpecError as error:
                self._not_greeted(call.shard, error)
                return None

        found = await asyncio.gather(*map(one, calls.inspect(self._core, timeout)))
        return [answer for answer in found if answer is not None]

    async def flush(self, seconds: float) -> None:
        """See BlockingConnections."""
        until = time.monotonic() + seconds
        while touched := self._core.flush():
            self._streams.kick(touched)
            await asyncio.sleep(0)
            await self._until(partial(self._core.settled, touched), until - time.monotonic())
            if time.monotonic() >= until:
                self._core.overdue(touched)
                return

    async def send_last(self) -> None:
        """See BlockingConnections."""
        await self.flush(self._core.config.timeouts.shutdown)
        self._report()

    async def end(self) -> None:
        """Closes the connections, also if the caller is cancelled meanwhile."""
        self._core.stop()
        task = asyncio.get_running_loop().create_task(self._close())
        _ending.add(task)
        task.add_done_callback(_ending.discard)
        await asyncio.shield(task)

    async def _close(self) -> None:
        await self._streams.end_all()
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()
        at_exit.leave(self)

    def leave_closed_loop(self) -> None:
        """Gives up the loop if it is closed, and with it all connections; another loop may send what waits."""
        loop = self._streams.loop
        if loop is not None and loop.is_closed():
            self._streams.give_up_loop()
            self._channels.clear()

    def dropped(self) -> None:
        """Sends finished responses and closes the connections after the client was collected, on its loop."""
        loop = self._streams.loop
        if quiet_grpc.forked() or (loop is None and not self._core.unacknowledged):
            at_exit.leave(self)
            return
        try:
            if loop is None:
                raise RuntimeError
            loop.call_soon_threadsafe(self._end_soon)
        except RuntimeError:  # the loop is closed
            self._dropped_later()

    def _dropped_later(self) -> None:
        """Ends the connections without their loop: in a thread with another one, if responses wait."""
        if not self._core.unacknowledged:
            self._streams.abandon()
            at_exit.leave(self)
            return
        with contextlib.suppress(RuntimeError):  # the interpreter shuts down, and `at_exit` sends them
            _thread.start_new_thread(self.at_exit, ())

    def _end_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._send_and_end())
        _ending.add(task)
        task.add_done_callback(_ending.discard)

    async def _send_and_end(self) -> None:
        await self.send_last()
        await self.end()

    def at_exit(self) -> None:
        """Sends finished responses when the process ends, on the client's loop, or on another if that is closed."""
        if not self._core.unacknowledged:
            self._report()
            return
        self.leave_closed_loop()
        loop = self._streams.loop
        if loop is None:
            asyncio.run(self._send_and_end())
        elif loop.is_running():  # in another thread
            sent = asyncio.run_coroutine_threadsafe(self.send_last(), loop)
            concurrent.futures.wait([sent], self._core.config.timeouts.shutdown)
            self._report()
        else:
            loop.run_until_complete(self.send_last())


def _elsewhere(function: Callable[[], T]) -> T:
    """Calls a function in another thread, and waits for it."""
    return _side_by_side(lambda _: function(), [None])[0]


def _side_by_side(function: Callable[[S], T], inputs: Sequence[S]) -> list[T]:
    """Calls a function for each input, in threads. Returns the results in the order of the inputs.

    After an error of a function, or an interrupt, it waits for no thread, and begins no further call. It uses no pool
    of `concurrent.futures`: an interrupt may leave a lock of a future taken, for which its thread would wait for ever.
    """
    inputs = list(inputs)
    left = iter(range(len(inputs)))
    results: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    over = False

    def work() -> None:
        for i in left:
            if over:
                return
            try:
                results.put((i, function(inputs[i]), None))
            except BaseException as error:
                results.put((i, None, error))

    ordered: list[Any] = [None] * len(inputs)
    try:
        for _ in range(min(AT_A_TIME, len(inputs))):
            _thread.start_new_thread(work, ())
        for _ in inputs:
            i, ordered[i], error = results.get()
            if error is not None:
                raise error
    finally:
        over = True
    return ordered


def _not_kept(error: Exception) -> None:
    """Logs that a batch could not be sent: in a forked process, or where no more threads can begin."""
    log.warning("HistoSpec: finished responses are not stored: %s", error)


def _skip(lost: set[Shard], shard: Shard, error: Unavailable) -> None:
    """Leaves a shard out for the rest of a batch: each further call would wait for its timeout."""
    if shard not in lost:
        lost.add(shard)
        log.warning("HistoSpec: %s; it is not asked again for this batch", error)
