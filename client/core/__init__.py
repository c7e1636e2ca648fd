"""The client without its network: sessions, shards, deadlines, and what is kept for a shard that is away."""
