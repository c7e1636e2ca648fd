"""Imports gRPC before other modules of the server do, so that fewer of its threads wake for each message."""

from histospec.protocol.grpc_settings import import_grpc, one_poller

import_grpc(one_poller())
