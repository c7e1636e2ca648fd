"""The open sessions of one Draft stream: the client's ids, the engine's ids, and what a commit needs."""

import asyncio
import functools
from itertools import repeat
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from histospec.native import Engine
from histospec.server.history.history import History
from histospec.server.rpc import slices, wire
from histospec.server.rpc.answers import Commit
from histospec.server.stores.interface import Problem, Record, ResponseBatch

log = structlog.get_logger()

# Sessions with more tokens are opened in a thread, so that the event loop keeps running.
LONG_OPEN = slices.TOKENS


class Origin(NamedTuple):
    """What a commit needs of its session."""

    problem: Problem
    seed: int | None
    generation: int  # of its namespace, for History.commit


class OpenSessions:
    """Keeps the table and the engine in step. Used only on the event loop."""

    def __init__(self, engine: Engine, history: History) -> None:
        self._engine = engine
        self._history = history
        self._ids: dict[int, int] = {}  # the client's session id -> the engine's
        self._origins: dict[int, Origin] = {}  # by the client's id; the commit uses it

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, session: int) -> bool:
        return session in self._ids

    def numbers(self, sessions: list[int]) -> NDArray[np.int64]:
        """Returns the engine's ids, [B]; -1 for sessions that the stream does not have."""
        return np.array(list(map(self._ids.get, sessions, repeat(-1))), np.int64)

    def origin(self, session: int) -> Origin | None:
        """Returns the origin of a session; None if the stream does not have it."""
        return self._origins.get(session)

    def namespaces(self) -> set[str]:
        """Returns the namespaces of the open sessions."""
        return {origin.problem.namespace for origin in self._origins.values()}

    async def open(self, opening: wire.Open) -> None:
        """Opens a session in the engine, and starts to read its problem's history if the index lacks it."""
        problem = opening.problem
        number = await self._open_in_engine(opening)
        self._ids[opening.session] = number
        # A later turn belongs to the problem with which its prompt begins, in the store as in the index.
        named = self._engine.prompt_length(number) * opening.prompt.itemsize
        # It drops its seed: there, the seed would name the response after the first prompt.
        seed = opening.seed if named == len(problem.prompt) else None
        problem = problem._replace(prompt=problem.prompt[:named])
        self._origins[opening.session] = Origin(problem, seed, self._history.missing.want(problem))

    async def _open_in_engine(self, opening: wire.Open) -> int:
        open_session = functools.partial(
            self._engine.open,
            opening.problem.namespace,
            opening.prompt,
            problem=opening.problem.name or None,
            generated=opening.generated,
            seed=opening.seed,
        )
        if opening.prompt.size + opening.generated.size <= LONG_OPEN:
            return open_session()
        opened = asyncio.ensure_future(asyncio.to_thread(open_session))
        try:
            return await asyncio.shield(opened)
        except asyncio.CancelledError:  # the stream has ended, but the thread continues
            opened.add_done_callback(lambda done: self._close(done.result()))
            raise

    def has(self, session: int, generated: int) -> bool:
        """Returns whether the session is open and has generated this many tokens."""
        number = self._ids.get(session)
        return number is not None and self._engine.lengths(np.array([number], np.int64))[0] == generated

    def commit(self, close: wire.Close, epoch: int) -> Commit:
        """Closes an open session. Afterwards the index has its response, the store does not yet."""
        number, origin = self._ids[close.session], self._origins[close.session]
        tokens = self._engine.generated(number).tobytes()
        record = Record(tokens, epoch, close.reward, close.logprobs, seed=origin.seed, alternatives=close.alternatives)
        batch = ResponseBatch(origin.problem, [record])
        self._history.epochs.saw(batch)
        self._engine.close(number, commit=True, epoch=epoch, alternatives=close.alternatives)
        del self._ids[close.session], self._origins[close.session]
        return Commit(close.session, batch, origin.generation)

    def forget(self, session: int) -> None:
        """Closes a session without a commit, if it is open."""
        number = self._ids.pop(session, None)
        self._origins.pop(session, None)
        if number is not None:
            self._close(number)

    def forget_all(self) -> "asyncio.Task[None]":
        """Closes all sessions, in slices. Each is in the table until the engine has closed it."""
        return asyncio.ensure_future(slices.close(list(self._ids), self.forget))

    def _close(self, number: int) -> None:
        try:
            self._engine.close(number, commit=False)
        except KeyError:
            log.warning("session was gone", session=number)
