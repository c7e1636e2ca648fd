"""Connects to a Redis that may be unreachable when the server starts: retries while it may come back."""

import time
from collections.abc import Callable

import redis
import structlog

from histospec.server.errors import ConfigError, StoreError
from histospec.server.stores.interface import Reader
from histospec.server.stores.opening import Progress
from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.servers import TRANSIENT

log = structlog.get_logger()

FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0  # seconds between tries; the pause doubles
SAID_EVERY = 60.0  # seconds between two log lines about one outage


def reach(store: Reader, where: Callable[[], Location], url_may_change: bool, progress: Progress) -> dict[str, int]:
    """Reads the newest epochs of a store as soon as it answers.

    Args:
        store: in Redis.
        where: returns the current location, for messages.
        url_may_change: whether a rejected password may still be replaced.
        progress: receives what is being waited for.

    Raises:
        ConfigError: Redis answers, and can never do what is needed; the message says why.
        GivenUp: as `progress` does.

    """
    started = time.monotonic()
    said: float | None = None
    pause = FIRST_PAUSE
    progress.tell(f"connecting to {where()}")
    while True:
        try:
            newest = store.newest_epochs()
        except StoreError as error:
            why = error.__cause__ or error
            if not comes_back(why, url_may_change):
                advice = "give the URL of a server that accepts it"
                if isinstance(why, redis.AuthenticationError):
                    advice = "give a valid user and password, redis://USER:PASSWORD@HOST:PORT"
                raise ConfigError(f"--store {where()}: {why}; {advice}") from None
        else:
            break
        now = time.monotonic()
        if said is None or now - said >= SAID_EVERY:
            said = now
            text = "the store does not answer; the server drafts from running sessions and retries"
            log.warning(text, store=str(where()), reason=str(why), seconds=round(now - started))
        progress.tell(f"{where()} does not answer ({why}), trying again")
        progress.wait(pause)
        pause = min(2 * pause, LAST_PAUSE)
    if said is not None:
        log.info("the store answers", store=str(where()), seconds=round(time.monotonic() - started))
    return newest


def comes_back(error: BaseException, url_may_change: bool) -> bool:
    """Returns whether the same request may succeed later, with the same URL or a replaced one."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return url_may_change
    return isinstance(error, TRANSIENT)
