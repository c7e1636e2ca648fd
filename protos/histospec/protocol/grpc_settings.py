"""Settings of gRPC's core that only the environment can give, which the core reads once, when it is first imported."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module, metadata

ONE_POLLER = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}
"""The thread that waits for a completion queue also reads the sockets. With gRPC's event engine, four threads wake for
a message: the one that polls, the one that polls next, the one that runs the callback, and the one that waits."""
NEWEST = (1, 85)
"""The newest version known to have these settings, as 1.71 has; a version without them would log an error."""


def import_grpc(settings: Mapping[str, str]) -> None:
    """Imports gRPC with these variables set. Leaves the environment as it was.

    A variable that the environment has keeps its value. Does nothing if gRPC was imported before.
    """
    if "grpc" in sys.modules:
        return
    mine = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        import_module("grpc")
    finally:
        for name in mine:
            del os.environ[name]


def one_poller() -> Mapping[str, str]:
    """Returns ONE_POLLER if the installed gRPC has these settings."""
    try:
        version = tuple(map(int, metadata.version("grpcio").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return ONE_POLLER if version <= NEWEST else {}
