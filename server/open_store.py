"""Opens the store that a configuration names."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histospec.protocol.redaction import file_name
from histospec.server.errors import ConfigError, StoreError, reason
from histospec.server.machine import free_bytes
from histospec.server.security.watched_files import Watched, read_text
from histospec.server.settings.config import StoreConfig
from histospec.server.stores.interface import Reader, Store
from histospec.server.stores.opening import Opened, Progress
from histospec.server.stores.redis.location import Location
from histospec.server.stores.sqlite.file import FILE_NAME, written_bytes
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore

if TYPE_CHECKING:
    from histospec.server.stores.redis.store import RedisStore

DAY = 86_400.0  # seconds
DISK_SHARE = 0.9
"""The default size of the SQLite file, as a share of it and the free space; the log and other files need the rest."""


def location_of(config: StoreConfig) -> "Watched[Location] | None":
    """Returns the location that --store-file holds; None without that option. Raises ConfigError."""
    path = config.store_file
    if path is None:
        return None

    def words(error: Exception) -> str:
        return f"{file_name(path)}: {reason(error)}"  # parse errors repeat no password

    try:
        return Watched("store-file", (path,), lambda: Location.parse(read_text(path).strip()), words)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--store-file {words(error)}; give a file that holds the URL of the store") from None


def open_store(config: StoreConfig, shard: str) -> Store:
    """Opens the store and connects to it once. `shard` is this shard's name among those that share the store.

    Raises:
        ConfigError: the store cannot be used; the message says what to change.
    """
    if config.kind == "sqlite":
        return _open_sqlite(config)
    store, where = _redis(config, shard, location_of(config))
    try:
        store.newest_epochs()
    except StoreError as error:
        store.close()
        raise ConfigError(f"--store {where()}: {error}; give the address of a server that answers") from None
    return store


def open_patiently(config: StoreConfig, shard: str, watched: "Watched[Location] | None", progress: Progress) -> Opened:
    """Opens the store for a server: retries while the store is unreachable.

    Args:
        config: names the store.
        shard: this shard's name among those that share the store.
        watched: the file with the store's URL, from `location_of`.
        progress: receives what is being done.

    Raises:
        ConfigError: the store can never be used as configured; the message says what to change.
        GivenUp: as `progress` does.

    """
    if config.kind == "sqlite":
        sqlite = _open_sqlite(config)
        return Opened(sqlite, sqlite.newest_epochs())
    store, where = _redis(config, shard, watched)
    from histospec.server.stores.redis.servers import reach

    try:
        return Opened(store, reach(store, where, watched is not None, progress))
    except BaseException:
        store.close()
        raise


def open_reader(config: StoreConfig) -> Reader:
    """Opens the store for reading while servers may use it, with all responses of each problem, whatever the limits.

    SQLite shows the state of this moment.

    Raises:
        ConfigError: as in `open_store`, or the store does not exist.
    """
    if config.kind == "sqlite":
        return SQLiteSnapshot(config.data_dir)
    return open_store(config.model_copy(update={"history_responses": 0}), "")


def _open_sqlite(config: StoreConfig) -> SQLiteStore:
    disk = config.disk
    if disk is None:
        # What others have on the volume is not this file's, so a shared disk counts by its free space.
        held = written_bytes(config.data_dir / FILE_NAME) or 0
        disk = int(DISK_SHARE * (held + free_bytes(config.data_dir))) >> 20 << 20  # whole MiB
    return SQLiteStore(config.data_dir, config.history_epochs, disk=disk or None, **_common(config))


def _common(config: StoreConfig) -> dict[str, Any]:
    return {
        "history_responses": config.history_responses,
        "retention": config.retention * DAY,
        "max_backlog": config.max_backlog,
    }


def _redis(
    config: StoreConfig, shard: str, watched: "Watched[Location] | None"
) -> "tuple[RedisStore, Callable[[], Location]]":
    from histospec.server.stores.redis.servers import Servers  # a sixth of the server's imports, and rarely needed
    from histospec.server.stores.redis.store import RedisStore

    if watched is not None:
        where = watched.look
    else:
        fixed = Location.parse(config.store)

        def where() -> Location:
            return fixed

    ca = where().ca
    if ca is not None:
        try:
            read_text(Path(ca))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--store {where()}: ca: {file_name(ca)}: {reason(error)}; give a file of certificates"
            ) from None
    return RedisStore(Servers(where), config.history_epochs, shard, **_common(config)), where
