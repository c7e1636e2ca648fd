"""A store that a separate thread opens while the server already listens.

Opening may take long: SQLite copies what can be read of a damaged file, and Redis may be unreachable. Until the store
is open, every request fails with StoreOpening; afterwards, the opened store serves it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar, cast

from histospec.server.errors import StoreOpening
from histospec.server.stores.interface import Store, StoreSize

F = TypeVar("F", bound=Callable[..., Any])

CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for the opening thread to notice; a look-up of a name may take longer."""


class GivenUp(Exception):  # noqa: N818 - not an error: the server stops before its store is open
    """The server no longer needs the store."""


class Progress:
    """The progress of opening a store. Thread-safe. After `give_up`, `report` and `wait` raise GivenUp."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self.text = "being opened"

    def report(self, text: str) -> None:
        """Records what is being done. Call it between slices of long work."""
        self.text = text
        self.wait(0)

    def wait(self, seconds: float) -> None:
        """Waits."""
        if self._given_up.wait(seconds):
            raise GivenUp

    def give_up(self) -> None:
        """Ends the opening at the next `report` or `wait`."""
        self._given_up.set()


class Opened(NamedTuple):
    """An open store, and the newest epochs that it returned."""

    store: Store
    newest_epochs: dict[str, int]


def _asks(method: F) -> F:
    """Returns a method that asks the opened store; until it is open, the method raises StoreOpening."""
    name = method.__name__

    def ask(self: "OpeningStore", *arguments: Any, **options: Any) -> Any:
        return getattr(self.opened_store(), name)(*arguments, **options)

    return cast(F, ask)


def _submits(method: F) -> F:
    """Returns a method that asks the opened store; until it is open, the returned future fails with StoreOpening."""
    ask = _asks(method)

    def submit(self: "OpeningStore", *arguments: Any) -> "Future[Any]":
        try:
            return cast("Future[Any]", ask(self, *arguments))
        except StoreOpening as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    return cast(F, submit)


def _shows(name: str, before: Any) -> Any:
    """Returns a property of the opened store; until it is open, `before`."""
    return property(lambda self: before if self._store is None else getattr(self._store, name))


class OpeningStore(Store):
    """Forwards requests to the store that `open_` opens.

    Args:
        open_: opens the store and reports progress. Raises ConfigError if the store can never be used.

    """

    def __init__(self, open_: Callable[[Progress], Opened]) -> None:
        self._open = open_
        self._progress = Progress()
        self._store: Store | None = None
        self._opened: Future[dict[str, int]] = Future()
        self._thread = threading.Thread(target=self._run, name="open", daemon=True)
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> "Future[dict[str, int]]":
        """Starts to open the store. The future holds the newest epoch of each namespace.

        It fails with the error of the opening, or with GivenUp after `close`.
        """
        self._thread.start()
        return self._opened

    def _run(self) -> None:
        try:
            store, newest = self._open(self._progress)
        except BaseException as error:
            self._opened.set_exception(error)
            return
        with self._lock:
            if not self._closed:
                self.whole_at_start = store.whole_at_start
                self._store = store
        if self._store is None:
            store.close()
            self._opened.set_exception(GivenUp())
        else:
            self._opened.set_result(newest)

    def opened_store(self) -> Store:
        """Returns the store. Raises StoreOpening if it is not open yet."""
        if self._store is None:
            raise StoreOpening(f"store: it is not open yet ({self._progress.text}); try later")
        return self._store

    @property
    def opening(self) -> str:
        """See Store."""
        return "" if self._store is not None else self._progress.text

    size = _shows("size", StoreSize())
    waiting_bytes = _shows("waiting_bytes", 0)
    waiting_limit = _shows("waiting_limit", 0)
    trouble = _shows("trouble", "")
    hazard = _shows("hazard", "")
    outage = _shows("outage", "")
    retention_paused = _shows("retention_paused", "")
    damaged_responses = _shows("damaged_responses", 0)
    complete = _asks(Store.complete)
    newest_epochs = _asks(Store.newest_epochs)
    replaced = _asks(Store.replaced)
    problems = _asks(Store.problems)
    history = _asks(Store.history)
    estimator = _asks(Store.estimator)
    estimators = _asks(Store.estimators)
    pages = _asks(Store.pages)
    sizes = _asks(Store.sizes)
    count = _asks(Store.count)
    wanted_first = _asks(Store.wanted_first)
    look_for_damage = _asks(Store.look_for_damage)
    append = _submits(Store.append)
    drop = _submits(Store.drop)
    rewind = _submits(Store.rewind)
    save_estimator = _submits(Store.save_estimator)

    def close(self) -> None:
        """Closes the store, or stops opening it."""
        with self._lock:
            self._closed = True
        self._progress.give_up()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._store is not None:
            self._store.close()
