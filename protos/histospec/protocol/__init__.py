"""What a server and its clients must agree on besides the messages. Without I/O; only `grpc_settings` knows gRPC."""
