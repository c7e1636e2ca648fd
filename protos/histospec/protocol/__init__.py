"""What a server and its clients must agree on besides the messages. Without gRPC and without I/O."""
