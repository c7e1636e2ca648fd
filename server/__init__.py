"""The draft server: RPC service, engine, store, lifecycle, configuration, metrics and the command line."""

from histospec.protocol.grpc_settings import import_grpc, one_poller

import_grpc(one_poller())  # before other modules import it
