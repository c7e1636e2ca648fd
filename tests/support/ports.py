"""Ports for servers that are told theirs."""

import random
import socket

FIRST, LAST = 10_240, 22_000
"""Below those that the system gives to connections, so that no connection takes one while its server is away."""
BUS = 10_000  # a node of a Redis Cluster listens so far above its port, too


def free_port() -> int:
    """A port on loopback that nothing listens on, and at random, so that others are likely to choose others."""
    while True:
        port = random.SystemRandom().randint(FIRST, LAST)
        if _is_free(port) and _is_free(port + BUS):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
