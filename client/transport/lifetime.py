"""Ends the connections of a client when it is shut down, or when it is garbage-collected without a shutdown.

The garbage collector runs in any thread, while any lock may be held and any loop may turn. It therefore closes nothing
itself: the loop of the client does, or a thread for this alone.
"""

import _thread
import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from histospec.client import fork
from histospec.client.config import Endpoint
from histospec.client.core.core import Core
from histospec.client.transport.pump import Pump
from histospec.client.transport.stream import Streams

log = logging.getLogger("histospec.client")

_ending: "set[asyncio.Task[None]]" = set()
"""Tasks that end clients; a loop keeps only weak references to its tasks."""


@dataclass(eq=False)
class Connections:
    """Everything that a client has open. Has no reference to the client, so that it can be collected."""

    core: Core
    streams: Streams
    channels: dict[Endpoint, Any] = field(default_factory=dict)
    """Channels for single calls."""

    def _warn(self) -> None:
        if waiting := self.core.stats().pending_commits:
            log.warning("HistoSpec: a client was dropped without shutdown: %d finished responses are lost", waiting)


@dataclass(eq=False)
class PumpedConnections(Connections):
    """The connections of a blocking client."""

    pump: Pump = field(kw_only=True)

    def end(self) -> None:
        """Closes the connections."""
        self.core.stop()
        self.pump.finish(self.streams.end_all, self.core.config.timeouts.shutdown)
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def dropped(self) -> None:
        """Closes the connections after the client was collected, in a thread."""
        if fork.forked() or not (self.channels or self.pump.used):
            return
        try:
            _thread.start_new_thread(self._end_quietly, ())
        except RuntimeError:  # the interpreter shuts down
            log.debug("HistoSpec: a client is left open at exit")

    def _end_quietly(self) -> None:
        try:
            self._warn()
            self.end()
        except Exception:
            log.debug("HistoSpec: a client that was dropped could not be closed", exc_info=True)


@dataclass(eq=False)
class LoopConnections(Connections):
    """The connections of an asyncio client."""

    async def end(self) -> None:
        """Closes the connections."""
        self.core.stop()
        await self.streams.end_all()
        channels = list(self.channels.values())
        self.channels.clear()
        for channel in channels:
            await channel.close()

    def dropped(self) -> None:
        """Closes the connections after the client was collected, on its loop."""
        loop = self.streams.loop
        if fork.forked() or loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._end_soon)
        except RuntimeError:  # the loop is closed; nothing can wait any more
            self.streams.abandon()

    def _end_soon(self) -> None:
        self._warn()
        task = asyncio.get_running_loop().create_task(self.end())
        _ending.add(task)
        task.add_done_callback(_ending.discard)
