"""A model of how many shards a deployment needs."""
