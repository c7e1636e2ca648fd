"""Ends the connections of a client: when it is shut down, and when it was dropped without.

The garbage collector runs in any thread, while any lock may be held and any loop may turn. So it closes nothing: it
leaves that to the loop of the client, or to a thread that does nothing else.
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
"""Loops keep weak references alone."""


@dataclass(eq=False)
class Connections:
    """All that a client has open. Knows nothing of the client, which can be collected therefore."""

    core: Core
    streams: Streams
    channels: dict[Endpoint, Any] = field(default_factory=dict)
    """For single calls."""

    def _warn(self) -> None:
        if waiting := self.core.stats().pending_commits:
            log.warning("HistoSpec: a client was dropped without shutdown: %d finished responses are lost", waiting)


@dataclass(eq=False)
class PumpedConnections(Connections):
    """Those of a blocking client."""

    pump: Pump = field(kw_only=True)

    def end(self) -> None:
        """Closes them."""
        self.core.stop()
        self.pump.finish(self.streams.end_all, self.core.config.timeouts.shutdown)
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def dropped(self) -> None:
        """The client was collected."""
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
    """Those of an asyncio client."""

    async def end(self) -> None:
        """Closes them."""
        self.core.stop()
        await self.streams.end_all()
        channels = list(self.channels.values())
        self.channels.clear()
        for channel in channels:
            await channel.close()

    def dropped(self) -> None:
        """The client was collected."""
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
