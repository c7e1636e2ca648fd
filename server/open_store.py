"""Which store a configuration means."""

from typing import Any

from histospec.server.errors import ConfigError, StoreError
from histospec.server.settings.config import StoreConfig
from histospec.server.stores.interface import Reader, Store
from histospec.server.stores.redis.location import Location
from histospec.server.stores.sqlite.snapshot import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore

DAY = 86_400.0  # seconds


def open_store(config: StoreConfig, shard: str) -> Store:
    """The store, opened and reached. `shard` names who opens it among those that share it.

    Raises:
        ConfigError: it cannot be used; the message says what to change.
    """
    common: dict[str, Any] = {
        "history_responses": config.history_responses,
        "retention": config.retention * DAY,
        "max_backlog": config.max_backlog,
    }
    if config.store == "sqlite":
        return SQLiteStore(config.data_dir, config.history_epochs, disk=config.disk, **common)
    from histospec.server.stores.redis.store import RedisStore  # a sixth of what a server imports, and few need it

    location = Location.parse(config.store)
    store = RedisStore(location, config.history_epochs, shard, **common)
    try:
        store.newest_epochs()
    except StoreError as error:
        store.close()
        raise ConfigError(f"--store {location}: {error}; give the address of a server that answers") from None
    return store


def open_reader(config: StoreConfig) -> Reader:
    """The store for reading, also while servers use it: of SQLite what it holds at this moment.

    Raises:
        ConfigError: as `open_store`, or there is none.
    """
    if config.store == "sqlite":
        return SQLiteSnapshot(config.data_dir, config.history_responses)
    return open_store(config, "")
