"""Imports gRPC before other modules of the client do, with the fork support of its core switched off (see `fork.py`).

The core also gets the settings of `protocol/grpc_settings.py`: fewer threads wake for each message.
"""

from histospec.protocol.grpc_settings import import_grpc, one_poller

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

import_grpc({VARIABLE: "0", **one_poller()})
