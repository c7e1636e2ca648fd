"""The draft server: RPC service, engine, store, lifecycle, configuration, metrics and the command line."""
