"""What a server and its clients must agree on beside the wire itself. No gRPC in here, and no I/O."""
