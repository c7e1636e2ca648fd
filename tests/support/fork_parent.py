"""The process that `forks` forks servers from: it has imported what a server imports, and has run none of it.

    python fork_parent.py DESCRIPTOR    # of a socket that brings a request for each server

It ends when the socket's other side does.
"""

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

sys.path[0] = ""  # not this folder, whose modules have names of others

EXIT = struct.Struct("i")
MOST_BYTES = 1 << 18  # of a request


def run(requests: socket.socket) -> None:
    """Forks a server for each request; returns in a server, which has its arguments then, or when no more come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever waits for a server ends alone
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 2)
        if not message:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wait_for_a_server(descriptors[1])
            become_a_server(json.loads(message), descriptors[0])
            return
        for descriptor in descriptors:
            os.close(descriptor)


def wait_for_a_server(told: int) -> None:
    """Returns in the server. In its parent waits for it, and tells its process id, and its exit code at the end."""
    pid = os.fork()
    if pid == 0:
        return
    os.closerange(2, told)  # the server alone holds its stderr, which ends with it
    os.write(told, EXIT.pack(pid))
    _, status = os.waitpid(pid, 0)
    os.write(told, EXIT.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def become_a_server(request: dict[str, Any], stderr: int) -> None:
    """What a new process would have of the one that starts it."""
    os.dup2(stderr, 2)
    os.closerange(3, 256)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.argv[1:] = request["words"]
    for number in (signal.SIGHUP, *request["ignoring"]):
        signal.signal(number, signal.SIG_IGN if number in request["ignoring"] else signal.SIG_DFL)


if __name__ == "__main__":
    importlib.import_module("histospec.server.app")
    cli = importlib.import_module("histospec.server.cli")
    gc.freeze()  # what is shared stays shared
    run(socket.socket(fileno=int(sys.argv[1])))
    gc.unfreeze()
    sys.exit(cli.main())
