"""Which store a configuration means."""

from typing import Any

from histospec.server.config import StoreConfig
from histospec.server.errors import ConfigError, StoreError
from histospec.server.redis_location import Location
from histospec.server.sqlite_snapshot import SQLiteSnapshot
from histospec.server.sqlite_store import SQLiteStore
from histospec.server.store import Reader, Store

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
    from histospec.server.redis_store import RedisStore  # a sixth of what a server imports, and few need it

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
