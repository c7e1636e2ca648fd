"""Places that callers share: each caller has its turn, and each of its connections.

With one queue, a caller with a thousand calls would delay the call of another by as many turns. With all places for one
caller, another would wait until that one is done.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Waiting = asyncio.Future[None]


class Places:
    """A number of places. Used only on the event loop.

    Args:
        most: the number.
        most_each: how many of them one caller may have at the same time ...
        most_of_connection: ... and one of its connections.
        may: says whether a caller may have one now. Call `give` when that changes.

    """

    def __init__(
        self, most: int, most_each: int, most_of_connection: int, may: Callable[[str], bool] = lambda caller: True
    ) -> None:
        self._free = most
        self._most_each = most_each
        self._most_of_connection = most_of_connection
        self._may = may
        self._taken: Counter[str] = Counter()  # by caller ...
        self._taken_of: Counter[tuple[str, str]] = Counter()  # ... and by caller and connection
        # By caller, by connection: those that wait. The next turn is that of the first.
        self._waiting: dict[str, dict[str, deque[Waiting]]] = {}

    @property
    def wanted(self) -> bool:
        """Whether a call waits for a place."""
        return bool(self._waiting)

    def waiting(self, caller: str) -> int:
        """Returns how many calls of a caller wait."""
        return sum(map(len, self._waiting.get(caller, {}).values()))

    @asynccontextmanager
    async def place(self, caller: str, connection: str) -> AsyncIterator[None]:
        """The block has a place. Waits for it."""
        leave = await self.take(caller, connection)
        try:
            yield
        finally:
            leave()

    async def take(self, caller: str, connection: str) -> Callable[[], None]:
        """Waits for a place. Returns what gives it back, which may be called several times."""
        await self._take(caller, connection)
        taken = True

        def leave() -> None:
            nonlocal taken
            if taken:
                taken = False
                self._count(caller, connection, -1)
                self.give()

        return leave

    async def _take(self, caller: str, connection: str) -> None:
        if self._free and self._eligible(caller) and self._taken_of[caller, connection] < self._most_of_connection:
            self._count(caller, connection, 1)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, {}).setdefault(connection, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just been given
                self._count(caller, connection, -1)
                self.give()
            else:
                self._leave(caller, connection, turn)
            raise

    def give(self) -> None:
        """Gives free places to calls that wait and may have one now."""
        while self._free and (turn := self._next()) is not None:
            turn.set_result(None)

    def _next(self) -> Waiting | None:
        """Returns the next call, which now has its place. Its caller and its connection go to the end of the queue."""
        for caller, connections in self._waiting.items():
            if not self._eligible(caller):
                continue
            for connection, turns in connections.items():
                turn = next((turn for turn in turns if not turn.done()), None)  # a cancelled one leaves by itself
                if turn is not None and self._taken_of[caller, connection] < self._most_of_connection:
                    self._count(caller, connection, 1)
                    connections[connection] = connections.pop(connection)
                    self._waiting[caller] = self._waiting.pop(caller)
                    self._leave(caller, connection, turn)
                    return turn
        return None

    def _eligible(self, caller: str) -> bool:
        return self._taken[caller] < self._most_each and self._may(caller)

    def _leave(self, caller: str, connection: str, turn: Waiting) -> None:
        connections = self._waiting[caller]
        connections[connection].remove(turn)
        if not connections[connection]:
            del connections[connection]
        if not connections:
            del self._waiting[caller]

    def _count(self, caller: str, connection: str, places: int) -> None:
        self._free -= places
        self._taken[caller] += places
        self._taken_of[caller, connection] += places
        if places < 0:
            if not self._taken_of[caller, connection]:
                del self._taken_of[caller, connection]
            if not self._taken[caller]:
                del self._taken[caller]
