"""gRPC: streams, single calls, and the discovery of shards."""
