"""The wire of SpecRL's updater: messages and stubs generated from rollout_cache.proto."""
