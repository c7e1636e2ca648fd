"""Which store a configuration means."""

from histospec.server.config import Config
from histospec.server.errors import ConfigError, StoreError
from histospec.server.redis_servers import Location
from histospec.server.redis_store import RedisStore
from histospec.server.sqlite_store import SQLiteStore
from histospec.server.store import Store


def open_store(config: Config, shard: str) -> Store:
    """The store, opened and reached.

    Raises:
        ConfigError: it cannot be used; the message says what to change.
    """
    if config.store == "sqlite":
        return SQLiteStore(config.data_dir, config.history_epochs)
    location = Location.parse(config.store)
    store = RedisStore(location, config.history_epochs, shard)
    try:
        store.newest_epochs()
    except StoreError as error:
        store.close()
        raise ConfigError(f"--store {location}: {error}; give the address of a server that answers") from None
    return store
