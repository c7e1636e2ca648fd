"""The gRPC services: they check requests, cut large ones into slices, and answer them."""
