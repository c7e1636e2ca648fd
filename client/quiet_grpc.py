"""Imports gRPC before anything else of the client does, with its core's handling of forks switched off.

Only where the environment does not decide it: see `fork.py`. The environment stays as it was.
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
