"""Rehearses a step shortly before it is due, so that code and data of a step are in the caches when it comes.

A worker steps, decodes for 10 to 60 ms, and steps again. By then the caches have lost most of what a step runs through:
the client, gRPC on both sides, the server's Python. The pauses of a worker are alike, so the client knows when the next
step is due. A thread sends the shards an empty step before that, and waits for the answers. The step itself then takes
about two thirds of the time (docs/benchmark-versions.md).
"""

import _thread
import contextlib
import logging
import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median

from histospec.client.core.core import Core
from histospec.client.transport.pump import Pump
from histospec.client.transport.stream import Streams

log = logging.getLogger("histospec.client")

LEAD = 0.0025
"""Seconds from the begin of a rehearsal to the step. At 1.5 ms, steps of 256 sessions take 8 % longer than at 2.5."""
PATIENCE = 0.005
"""Seconds for which a rehearsal waits for its answers."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds. A rehearsal takes a millisecond of CPU time in client and server together, which is at most a tenth of a
core. A longer pause is not of a worker that decodes."""
LAST = 9
"""The pauses whose median is expected next."""


class Rehearsals:
    """Learns when the steps of one client are due, and rehearses each in a thread.

    The thread begins with the first pause that is long enough, and ends with `end`. While pauses are regular, a timer
    wakes it: a worker that wakes it loses time in its step. Nothing here takes a lock, because the garbage collector
    and signal handlers may interrupt every method.

    Args:
        rehearse: called in the thread, with a function that returns whether the step has not begun yet.
        clock: returns seconds that never decrease.
        on: whether to rehearse at all.
    """

    def __init__(
        self,
        rehearse: Callable[[Callable[[], bool]], None],
        clock: Callable[[], float] = time.monotonic,
        on: bool = True,
    ) -> None:
        self.on = on
        self._rehearse = rehearse
        self._clock = clock
        self._pauses: deque[float] = deque(maxlen=LAST)
        self._answered: float | None = None
        self._due: float | None = None  # when to rehearse; None: not before a further answer
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the thread
        self._wakes = -math.inf  # when its timer ends, or ended
        self._running = self._ended = False

    def stepped(self) -> None:
        """Notes that a step begins."""
        self._due = None
        answered, self._answered = self._answered, None
        if answered is not None:
            self._pauses.append(self._clock() - answered)

    def answered(self) -> None:
        """Notes that the worker has the drafts of its step, and expects the next step."""
        self._answered = now = self._clock()
        if not self.on or not self._pauses or not SHORTEST_PAUSE <= (pause := median(self._pauses)) <= LONGEST_PAUSE:
            return
        self._due = due = now + pause - LEAD
        if not self._running:
            self._running = True
            with contextlib.suppress(RuntimeError):  # no further thread can begin
                _thread.start_new_thread(self._run, ())
        elif due < self._wakes:
            self._bell.put(None)

    def end(self) -> None:
        """Ends the thread."""
        self._due, self._ended = None, True
        self._bell.put(None)

    def _run(self) -> None:
        rehearsed = None
        try:
            while not self._ended:
                due = self._due
                if due is None or due == rehearsed:
                    self._sleep(math.inf, due)
                elif self._sleep(due, due):
                    self._rehearse(lambda: self._due == due)  # noqa: B023 - called before `due` changes
                    rehearsed = due
                    self._sleep(due + SHORTEST_PAUSE, due)  # no step is due before, and by then the next one is known
        except Exception:  # a bug must not disturb the worker
            log.exception("HistoSpec: the client rehearses no further steps")
        self._wakes = -math.inf

    def _sleep(self, until: float, due: float | None) -> bool:
        """Sleeps until a time or until the bell rings. Returns whether the time has come and `_due` is still `due`."""
        self._wakes = until
        if self._due == due:  # else `answered` may have looked at `_wakes` before
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=None if until == math.inf else max(0.0, until - self._clock()))
                return False
        return self._due == due


def of(core: Core, streams: Streams, pump: Pump) -> Rehearsals:
    """Returns the rehearsals of a client. There are none if they are switched off, or with one CPU for the process."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Rehearsals(partial(_rehearse, core, streams, pump), on=core.config.rehearse and cpus > 1)


def _rehearse(core: Core, streams: Streams, pump: Pump, wanted: Callable[[], bool]) -> None:
    """Sends an empty step to every healthy shard, and waits for the answers while the step itself has not begun."""
    shards = core.rehearse()
    if shards:
        pump.wait(lambda: not (wanted() and core.rehearsing(shards)), PATIENCE, partial(streams.kick, shards))
