"""Responses in Redis or Valkey, alone or as a Cluster."""
