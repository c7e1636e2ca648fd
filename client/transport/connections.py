"""Everything that a client has open: its streams, and the channels of its single calls; and how single calls are made.

The two faces do the same, one in the threads of its callers (`blocking`), the other on their loop (`on_loop`). What
they share is written once, as coroutines. Those of the blocking face never wait for a loop: it runs them as functions.

Connections do not refer to their client, so that it can be garbage-collected. The collector runs in any thread, while
any lock may be held and any loop may turn. It therefore closes nothing itself: the loop of the client does, or a thread
for this alone.
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
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
from histospec.client.transport.stream import Streams
from histospec.client.values import Inspection
from histospec.v1 import draft_pb2_grpc as rpc

log = logging.getLogger("histospec.client")

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Connections(ABC):
    """The connections of a client. `kind` is grpc or grpc.aio."""

    def __init__(self, core: Core, streams: Streams, kind: ModuleType) -> None:
        self._core = core
        self._streams = streams
        self._kind = kind
        self._channels: dict[Endpoint, Any] = {}
        self._keeper = Keeper(core)
        self._lock = threading.Lock()
        self._ended = False
        """Whether single calls raise Unavailable."""
        self._reported = False
        """Whether the log says what is lost at the end."""
        at_exit.enter(self)

    # ---- what the faces do in their own ways ----------------------------------------------------------------------

    @abstractmethod
    async def _answer(self, method: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Returns the answer of gRPC's method to a request."""

    @abstractmethod
    async def _each(self, function: Callable[[S], Awaitable[T]], inputs: Sequence[S]) -> list[T]:
        """Calls a function for each input, AT_A_TIME of them in parallel. Returns the results in the same order.

        After an error of a function it begins no further call.
        """

    @abstractmethod
    async def _turn(self, first: Callable[[], None], done: Callable[[], bool], until: float) -> None:
        """Calls `first` on the loop of the streams, and waits until done() is true, or until a monotonic time."""

    @abstractmethod
    def at_exit(self) -> None:
        """Sends finished responses when the process ends, and logs which are lost."""

    # ---- single calls ---------------------------------------------------------------------------------------------

    async def find(self, timeout: float | None = None) -> None:
        """Waits until the client knows the shards; while it steps, it always knows them."""
        quiet_grpc.refuse_after_fork()
        if not (self._streams.found() or self._ended or self._core.closed):
            seconds = self._core.config.timeouts.call if timeout is None else timeout
            await self._turn(self._streams.discover, self._streams.found, time.monotonic() + seconds)

    async def do(
        self, build: Callable[Concatenate[Core, P], list[Call[T]]], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Finds the shards, then makes the calls that `build` returns, in turn. Returns their results."""

        async def in_turn(plan: list[Call[T]]) -> list[T]:
            return [await self.one(call) for call in plan]

        await self.find()
        return (await self._each(in_turn, [build(self._core, *args, **kwargs)]))[0]

    async def one(self, call: Call[T]) -> T:
        """Makes one call."""
        endpoint = call.endpoint
        with self._lock:
            channel = self._channels.get(endpoint)
            if self._ended or self._core.closed:
                raise Unavailable(f"{call.what}: this client is shut down")
            if channel is None:
                channel = self._channels[endpoint] = open_channel(self._kind, endpoint, self._core.config)
        method = getattr(rpc.DraftServiceStub(channel), call.method)
        try:
            answer = self._answer(method, call.request, timeout=call.timeout, metadata=metadata(self._core.config))
            return call.finish(await answer)
        except grpc.RpcError as error:
            pieces = self._smaller(call, channel, error)
        return call.join([await self.one(piece) for piece in pieces])

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

    async def many(self, plan: Sequence[Sequence[Call[T]]]) -> list[list[T] | None]:
        """Makes a list of calls for each problem. Returns their results; None if its shard cannot be reached.

        Raises:
            HistoSpecError: an error of a call other than Unavailable; calls that had not begun are then left out.
        """
        lost: set[Shard] = set()

        async def one(calls: Sequence[Call[T]]) -> list[T] | None:
            answers = []
            for call in calls:
                if call.shard in lost:
                    return None
                try:
                    answers.append(await self.one(call))
                except Unavailable as error:
                    if call.shard not in lost:  # each further call would wait for its timeout
                        lost.add(call.shard)
                        log.warning("HistoSpec: %s; it is not asked again for this batch", error)
                    return None
            return answers

        return await self._each(one, plan)

    async def keep(self, batch: Batch) -> list[bool]:
        """Stores a batch. Returns for each of its responses whether it is stored. Raises WrongLoop alone."""

        async def one(group: Group) -> None:
            try:
                stored = sum([await self.one(call) for call in self._keeper.calls(batch, group)])
                self._keeper.keep(batch, group, stored)
            except Exception as error:
                self._keeper.lose(batch, group, error)

        try:
            await self.find(self._core.config.timeouts.keep)
            await self._each(one, batch.groups)
            self._keeper.report(batch)
        except WrongLoop:
            raise
        except Exception as error:  # in a forked process, or where no more threads can begin
            log.warning("HistoSpec: finished responses are not stored: %s", error)
        return batch.stored

    async def greet(self, timeout: float) -> list[Inspection]:
        """Asks every shard for its state when a worker starts. Returns the answers of those that let this client read.

        The core logs why the others do not answer. All are asked in parallel, each for at most `timeout` seconds.

        Raises:
            ConfigurationError: a token file or certificate cannot be read.
        """

        async def one(call: Call[Inspection]) -> Inspection | None:
            try:
                answer = await self.one(call)
            except ConfigurationError:
                raise
            except HistoSpecError as error:
                code, details = grpc.StatusCode.UNAVAILABLE, str(error)
                if isinstance(error.__cause__, grpc.RpcError):
                    reported: Any = error.__cause__
                    code, details = reported.code(), reported.details() or ""
                self._core.unreachable(call.shard, code, details)
                return None
            if "read" in answer.rights:
                self._core.answered(call.shard)
                return answer
            details = f"its token has no right to read in namespace {self._core.config.namespace!r}"
            self._core.unreachable(call.shard, grpc.StatusCode.PERMISSION_DENIED, details)
            return None

        await self.find(timeout)
        answers = await self._each(one, calls.inspect(self._core, timeout))
        return [answer for answer in answers if answer is not None]

    # ---- what waits to be sent ------------------------------------------------------------------------------------

    async def flush(self, seconds: float) -> None:
        """Sends what waits, and waits until the shards have acknowledged the commits and the aborts."""
        until = time.monotonic() + seconds
        while touched := self._core.flush():
            await self._turn(partial(self._streams.kick, touched), partial(self._core.settled, touched), until)
            if time.monotonic() >= until:
                self._core.overdue(touched)
                return

    async def send_last(self) -> None:
        """Sends finished responses before the client or its process ends, and reports which are lost."""
        await self.flush(self._core.config.timeouts.shutdown)
        self._report()

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
