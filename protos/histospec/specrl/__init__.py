"""Messages and stubs generated from rollout_cache.proto, the protocol of SpecRL's updater."""
