"""Imports gRPC before other modules of the client do, with the fork support of its core switched off (see `fork.py`).

It does nothing if the environment sets the variable. The environment stays as it was.
"""

import os
import sys

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

if "grpc" not in sys.modules and VARIABLE not in os.environ:
    os.environ[VARIABLE] = "0"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[VARIABLE]
