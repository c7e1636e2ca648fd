"""A store that a separate thread opens while the server already listens.

Opening may take long: SQLite migrates a file of an older version, and Redis may be unreachable. Until the store is
open, every request raises StoreOpening; afterwards, the opened store serves it.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from histospec.server.errors import StoreOpening
from histospec.server.stores.interface import Problem, Record, ResponseBatch, Store, StoreSize

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""Seconds that `close` waits for the opening thread to notice; a look-up of a name may take longer."""


class GivenUp(Exception):  # noqa: N818 - not an error: the server stops before its store is open
    """The server no longer needs the store."""


class Progress:
    """The progress of opening a store. Thread-safe. After `give_up`, `tell` and `wait` raise GivenUp."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self.text = "being opened"

    def tell(self, text: str) -> None:
        """Records what is being done. Call it between slices of long work."""
        self.text = text
        self.wait(0)

    def wait(self, seconds: float) -> None:
        """Waits."""
        if self._given_up.wait(seconds):
            raise GivenUp

    def give_up(self) -> None:
        """Ends the opening at the next `tell` or `wait`."""
        self._given_up.set()


class Opened(NamedTuple):
    """An open store, and the newest epochs that it returned."""

    store: Store
    newest_epochs: dict[str, int]


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

    def _ready(self) -> Store:
        if self._store is None:
            raise StoreOpening(f"store: it is not open yet ({self._progress.text}); try later")
        return self._store

    def _later(self, ask: Callable[[Store], "Future[T]"]) -> "Future[T]":
        try:
            return ask(self._ready())
        except StoreOpening as error:
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed

    @property
    def opening(self) -> str:
        """See Store."""
        return "" if self._store is not None else self._progress.text

    @property
    def size(self) -> StoreSize:
        """See Store."""
        return StoreSize() if self._store is None else self._store.size

    @property
    def waiting_bytes(self) -> int:
        """See Store."""
        return 0 if self._store is None else self._store.waiting_bytes

    @property
    def waiting_limit(self) -> int:
        """See Store."""
        return 0 if self._store is None else self._store.waiting_limit

    @property
    def trouble(self) -> str:
        """See Store."""
        return "" if self._store is None else self._store.trouble

    @property
    def retention_paused(self) -> str:
        """See Store."""
        return "" if self._store is None else self._store.retention_paused

    @property
    def damaged_responses(self) -> int:
        """See Reader."""
        return 0 if self._store is None else self._store.damaged_responses

    def newest_epochs(self) -> dict[str, int]:
        """See Reader."""
        return self._ready().newest_epochs()

    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """See Reader."""
        return self._ready().problems(namespace)

    def history(self, problem: Problem, limit: int = 0, room: int | None = None) -> list[Record]:
        """See Reader."""
        return self._ready().history(problem, limit, room)

    def estimator(self, namespace: str) -> bytes | None:
        """See Reader."""
        return self._ready().estimator(namespace)

    def estimators(self) -> dict[str, bytes]:
        """See Reader."""
        return self._ready().estimators()

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        """See Reader."""
        return self._ready().pages(problem)

    def wanted_first(self) -> Iterator[list[Problem]]:
        """See Store."""
        return self._ready().wanted_first()

    def look_for_damage(self) -> None:
        """See Store."""
        self._ready().look_for_damage()

    def count(self) -> int:
        """See Reader."""
        return self._ready().count()

    def append(self, batch: ResponseBatch) -> "Future[None]":
        """See Store."""
        return self._later(lambda store: store.append(batch))

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""
        return self._later(lambda store: store.drop(namespace))

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""
        return self._later(lambda store: store.rewind(namespace, epoch))

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store."""
        return self._later(lambda store: store.save_estimator(namespace, state))

    def close(self) -> None:
        """Closes the store, or stops opening it."""
        with self._lock:
            self._closed = True
        self._progress.give_up()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        if self._store is not None:
            self._store.close()
