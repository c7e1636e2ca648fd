"""The connections of the blocking client, which makes single calls in threads of its own.

The caller only waits, because it may be the main thread, in which a signal handler may raise KeyboardInterrupt. In the
middle of gRPC's code this leaves locks taken, and all later calls of the channel wait for them.
"""

import _thread
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc

from histospec.client import quiet_grpc
from histospec.client.core.core import Core
from histospec.client.transport import at_exit
from histospec.client.transport.connections import Connections
from histospec.client.transport.pump import Pump
from histospec.client.transport.stream import Streams
from histospec.client.transport.threads import side_by_side

log = logging.getLogger("histospec.client")

S = TypeVar("S")
T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of BlockingConnections, none of which waits for a loop. Returns its value."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine waits for a loop")


class BlockingConnections(Connections):
    """See the module. Its coroutines block the thread that runs them."""

    def __init__(self, core: Core, streams: Streams, pump: Pump) -> None:
        super().__init__(core, streams, grpc)
        self._pump = pump
        self._end_lock = threading.Lock()
        self._closed = False
        """Whether all connections are closed."""

    async def _answer(self, method: Callable[..., Any], request: Any, **options: Any) -> Any:
        return method(request, **options)

    async def _each(self, function: Callable[[S], Awaitable[T]], inputs: Sequence[S]) -> list[T]:
        async def one(element: S) -> T:
            return await function(element)

        return side_by_side(lambda element: run(one(element)), inputs)

    async def _turn(self, first: Callable[[], None], done: Callable[[], bool], until: float) -> None:
        self._pump.run(first, until - time.monotonic())
        self._pump.wait(done, until - time.monotonic())

    def at_exit(self) -> None:
        """Sends finished responses when the process ends."""
        if self._core.unacknowledged:
            run(self.flush(self._core.config.timeouts.shutdown))
        self._report()

    def begin_end(self) -> bool:
        """Ends single calls: later ones raise Unavailable. Returns whether connections are to be closed."""
        self._ended = True
        return not self._closed

    def end(self) -> None:
        """Closes the connections. May be called again. An interrupt ends the wait for it, but not the work."""
        side_by_side(lambda _: self._end(), [None])

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
            run(self.send_last())
            self._end()
        except Exception:
            log.debug("HistoSpec: a client that was dropped could not be closed", exc_info=True)
