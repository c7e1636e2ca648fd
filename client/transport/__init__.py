"""gRPC: streams, single calls, and how shards are found."""
