"""gRPC and `fork`: a process forked from one that has connected cannot use gRPC, and must not touch what it inherited.

gRPC's threads do not come along, so nothing would ever be sent or time out. Sockets and epoll sets are shared with the
parent: closing a loop in the child would take the parent's sockets off its epoll set. So every method of a client
raises in such a process, and nothing that it inherited is closed there.

gRPC's core starts some of its threads again in a child, unless GRPC_ENABLE_FORK_SUPPORT=0, and crashes it now and then.
The core reads that when it is first imported; Python's half of gRPC has its fork support switched off by default.
"""

import os

from histospec.client.errors import Unavailable

_process: int | None = None
"""The process in which gRPC was first used here."""


def connecting() -> None:
    """This process is about to use gRPC."""
    global _process
    if _process is None:
        _process = os.getpid()


def forked() -> bool:
    """Whether this process was forked from one that had connected."""
    return _process is not None and _process != os.getpid()


def refuse() -> None:
    """Raises Unavailable in a process that was forked from one that had connected."""
    if forked():
        raise Unavailable(
            f"a draft client does not work here: process {os.getpid()} was forked from one that had connected already; "
            "start it with multiprocessing's 'spawn', or fork before the first client connects and make a new client "
            "in each process"
        )
