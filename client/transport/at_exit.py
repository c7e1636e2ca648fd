"""Sends the finished responses of clients that were not shut down when their process ends.

Python calls `_run` before it takes modules apart, so gRPC's threads still run. Python 3.12 and later start no thread by
then, so nothing here needs a new one. A worker of `multiprocessing` that was forked leaves without the functions of
`atexit`, but runs those of `multiprocessing.util`.
"""

import atexit
import logging
import os
import sys
from typing import Protocol

from histospec.client import quiet_grpc

log = logging.getLogger("histospec.client")


class Ending(Protocol):
    """The connections of a client."""

    def at_exit(self) -> None:
        """Sends finished responses, for at most `Timeouts.shutdown` seconds, and logs which are lost."""


_open: set[Ending] = set()
_worker = 0
"""The process whose `multiprocessing.util` knows `_run`."""


def enter(connections: Ending) -> None:
    """Notes connections that may have something to send when the process ends."""
    _open.add(connections)


def leave(connections: Ending) -> None:
    """Notes connections that have nothing more to send. The garbage collector may call it."""
    _open.discard(connections)


def prepare() -> None:
    """Notes that this process is about to connect."""
    global _worker
    if _worker != os.getpid() and (util := sys.modules.get("multiprocessing.util")) is not None:
        _worker = os.getpid()
        util.Finalize(None, _run, exitpriority=0)


@atexit.register
def _run() -> None:
    if quiet_grpc.forked():  # the clients are the parent's
        return
    for connections in list(_open):
        _end(connections)


def _end(connections: Ending) -> None:
    try:
        connections.at_exit()
    except Exception:
        log.warning("HistoSpec: the last responses of a client could not be sent", exc_info=True)
