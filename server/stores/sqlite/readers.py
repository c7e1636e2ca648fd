"""Connections that read one file side by side, and can be taken away from everybody who reads."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Readers:
    """Lends connections, each to one thread at a time. Thread-safe.

    Args:
        connect: opens a connection.
        most: how many connections there are at a time, at least 1; a thread that asks for another one waits.

    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], most: int) -> None:
        self._connect = connect
        self._most = most
        self._changed = threading.Condition()
        self._idle: list[sqlite3.Connection] = []
        self._lent: dict[object, sqlite3.Connection | None] = {}  # None: it is being opened
        self._away = self._closed = False
        self.generation = 0
        """How often others took the place of all connections: those of another generation read another file."""

    @contextmanager
    def one(self) -> Iterator[sqlite3.Connection]:
        """A connection for the duration of the block. Raises sqlite3.Error where none can be opened."""
        loan = object()
        with self._changed:
            self._changed.wait_for(self._free)
            if self._closed:
                raise sqlite3.ProgrammingError("the store is closed")
            connection = self._lent[loan] = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = self._lent[loan] = self._connect()
            yield connection
        finally:
            with self._changed:
                del self._lent[loan]
                if connection is not None:
                    self._idle.append(connection)
                self._changed.notify_all()

    def _free(self) -> bool:
        return self._closed or (not self._away and len(self._lent) < self._most)

    @contextmanager
    def away(self) -> Iterator[Callable[[], None]]:
        """Nobody reads during the block, which is given a function that closes the connections; others follow."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away)
            self._away = True
            self._changed.wait_for(lambda: not self._lent)
        try:
            yield self._close_idle
        finally:
            with self._changed:
                self.generation += 1
                self._away = False
                self._changed.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Interrupts what is being read, and closes the connections. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for connection in self._lent.values():
                if connection is not None:
                    connection.interrupt()
            self._changed.wait_for(lambda: not self._lent)
            self._close_idle()
