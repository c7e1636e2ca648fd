"""Imports gRPC before other modules of the client do, with fork support switched off, and refuses work after a fork.

A process forked from one that has connected cannot use gRPC, and must not close what it inherited. The child does not
have gRPC's threads, so calls would neither be sent nor time out. It shares sockets and epoll sets with the parent:
closing a loop in the child would remove the parent's sockets from its epoll set. Therefore every method of a client
raises in such a process, and the child closes nothing that it inherited.

Unless GRPC_ENABLE_FORK_SUPPORT=0, gRPC's core starts some of its threads again in the child, and sometimes crashes it.
The core reads this variable when it is first imported. The Python part of gRPC has its fork support off by default. The
core also gets the settings of `protocol/grpc_settings.py`: fewer threads wake for each message.
"""

import os

from histospec.protocol.grpc_settings import import_grpc, one_poller

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

import_grpc({VARIABLE: "0", **one_poller()})

from histospec.client.errors import Unavailable  # noqa: E402 - it imports gRPC

_process: int | None = None
"""The process in which gRPC was first used here."""


def note_connecting() -> None:
    """Notes that this process is about to use gRPC."""
    global _process
    if _process is None:
        _process = os.getpid()


def forked() -> bool:
    """Returns whether this process was forked from one that had connected."""
    return _process is not None and _process != os.getpid()


def refuse_after_fork() -> None:
    """Raises Unavailable in a process that was forked from one that had connected."""
    if forked():
        raise Unavailable(
            f"a draft client does not work here: process {os.getpid()} was forked from one that had already connected; "
            "start it with multiprocessing's 'spawn', or fork before the first client connects and make a new client "
            "in each process"
        )
