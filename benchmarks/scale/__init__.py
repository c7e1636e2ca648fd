"""How many shards a deployment needs."""
