"""gRPC: what arrives, checked and cut into slices, and what is answered."""
