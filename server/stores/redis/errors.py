"""What errors of Redis mean, for callers."""

import redis

from histospec.server.errors import StoreError, StoreFull


def is_about_its_key(error: Exception) -> bool:
    """Returns whether the command failed because its key has another type."""
    return isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE")


def explain(error: Exception) -> StoreError:
    """Returns the error that a caller gets."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreFull(f"store: the Redis server is full ({error}); nothing of this request is kept")
    if "No space left on device" in str(error):
        return StoreFull(f"store: the disk of the Redis server is full ({error}); nothing of this request is kept")
    return StoreError(f"store: {error}; nothing of this request is kept")
