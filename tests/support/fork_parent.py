"""The parent of the servers that `forks` forks. It imports what a server imports, and runs nothing.

    python fork_parent.py DESCRIPTOR    # of a socket that brings a request for each server

It ends when the other side closes the socket.
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

sys.path[0] = ""  # not this folder: its modules shadow others, such as `prometheus`

EXIT = struct.Struct("i")
MOST_BYTES = 1 << 18  # of a request


def run(requests: socket.socket) -> None:
    """Forks a server for each request. Returns in each server, with `sys.argv` set; exits after the last request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that wait for servers
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
    """Forks once more; returns in the server. The parent writes its process id, and its exit code when it ends."""
    pid = os.fork()
    if pid == 0:
        return
    os.closerange(2, told)  # the server alone holds its stderr: readers see its end
    os.write(told, EXIT.pack(pid))
    _, status = os.waitpid(pid, 0)
    os.write(told, EXIT.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def become_a_server(request: dict[str, Any], stderr: int) -> None:
    """Sets what a new process would get from the one that starts it."""
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
    gc.freeze()  # collections would copy shared pages
    run(socket.socket(fileno=int(sys.argv[1])))
    gc.unfreeze()
    sys.exit(cli.main())
