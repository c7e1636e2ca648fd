"""Connections that read one file concurrently, and that can be replaced while threads use them."""

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 0.01  # between interrupts: SQLite ignores one that comes before a statement starts


class Readers:
    """Lends connections, each to one thread at a time. Thread-safe.

    They are opened in advance: a connection opened later may find another file under the name, or none.
    """

    def __init__(self, connections: Iterable[sqlite3.Connection] = ()) -> None:
        self._changed = threading.Condition()
        self._idle = list(connections)
        self._lent: set[sqlite3.Connection] = set()
        self._away = self._closed = False
        self.generation = 0
        """How many times all connections were replaced: those of another generation read another file."""

    def add(self, connection: sqlite3.Connection) -> None:
        """Adds a connection to lend."""
        with self._changed:
            self._idle.append(connection)

    @contextmanager
    def one(self) -> Iterator[sqlite3.Connection]:
        """Lends a connection for the duration of the block. Raises sqlite3.Error once they are closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._idle and not self._away))
            if self._closed:
                raise sqlite3.ProgrammingError("the store is closed")
            connection = self._idle.pop()
            self._lent.add(connection)
        try:
            yield connection
        finally:
            with self._changed:
                self._lent.discard(connection)
                self._idle.append(connection)
                self._changed.notify_all()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Waits for all readers, and lends nothing during the block, which may `end` connections and `add` others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away)
            self._away = True
            self._changed.wait_for(lambda: not self._lent)
        try:
            yield
        finally:
            with self._changed:
                self.generation += 1
                self._away = False
                self._changed.notify_all()

    def end(self) -> None:
        """Closes the connections, none of which is lent."""
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Interrupts running reads and closes the connections. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._lent:
                for connection in self._lent:
                    connection.interrupt()
                self._changed.wait(AGAIN_SECONDS)
            self.end()
