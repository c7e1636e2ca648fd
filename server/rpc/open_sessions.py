"""The open sessions of one Draft stream: the client's ids, the engine's ids, and what a commit needs."""

import asyncio
import functools
import secrets
from itertools import repeat
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import xxhash
from numpy.typing import NDArray

from histospec.native import Engine
from histospec.server.history.history import History
from histospec.server.rpc import slices, wire
from histospec.server.rpc.answers import Commit
from histospec.server.stores.interface import Problem, Record, ResponseBatch

# Sessions with more tokens are opened in a thread, so that the event loop keeps running.
LONG_OPEN = 1 << 14

# Python does not key the hash of an int, so a client could choose session ids with which each look-up in a dict visits
# thousands of slots: 1 s for 3,000 look-ups instead of 0.3 ms. Keys of the dicts are therefore ids XOR this secret.
SECRET = secrets.randbits(64)


class Shared:
    """The problem of open sessions. Siblings share one, as in the engine, which counts their prompt once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def of(problem: Problem) -> "Shared":
        """Returns the one of this problem. Finds it by XXH3, which takes a tenth of the time of Python's hash for 2 MB.

        Of two prompts with one digest, which a client may choose, the later one takes the place.
        """
        key = problem.namespace, problem.name, xxhash.xxh3_128_digest(problem.prompt)
        shared = SHARED.get(key)
        if shared is None or shared.problem != problem:
            shared = SHARED[key] = Shared(problem)
        return shared


SHARED: WeakValueDictionary[tuple[str, str, bytes], Shared] = WeakValueDictionary()  # of the sessions of all streams


class Origin(NamedTuple):
    """What a commit needs of its session."""

    shared: Shared
    seed: int | None
    generation: int  # of its namespace, for History.commit
    tenant: str  # of its namespace

    @property
    def problem(self) -> Problem:
        """The problem to which its response belongs."""
        return self.shared.problem


class OpenSessions:
    """Keeps the table and the engine in step. Used only on the event loop."""

    def __init__(self, engine: Engine, history: History) -> None:
        self._engine = engine
        self._history = history
        self._ids: dict[int, int] = {}  # the client's session id ^ SECRET -> the engine's
        self._origins: dict[int, Origin] = {}  # by the same key; the commit uses it

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, session: int) -> bool:
        return session ^ SECRET in self._ids

    def numbers(self, sessions: list[int]) -> NDArray[np.int64]:
        """Returns the engine's ids, [B]; -1 for sessions that the stream does not have."""
        return np.array(list(map(self._ids.get, map(SECRET.__xor__, sessions), repeat(-1))), np.int64)

    def origin(self, session: int) -> Origin | None:
        """Returns the origin of a session; None if the stream does not have it."""
        return self._origins.get(session ^ SECRET)

    def namespaces(self) -> set[str]:
        """Returns the namespaces of the open sessions."""
        return {origin.problem.namespace for origin in self._origins.values()}

    async def open(self, opening: wire.Open) -> None:
        """Opens a session in the engine, and starts to read its problem's history if the index lacks it."""
        problem = opening.problem
        tenant = self._history.namespaces.tenant(problem.namespace)
        self._history.tenants.sessions[tenant] += 1  # before other streams ask for a share
        try:
            number, prompt_length, known = await self._open_in_engine(opening)
        except BaseException:
            self._history.tenants.sessions[tenant] -= 1
            raise
        self._ids[opening.session ^ SECRET] = number
        # A later turn belongs to the problem with which its prompt begins, in the store as in the index.
        named = prompt_length * opening.prompt.itemsize
        # It drops its seed: there, the seed would name the response after the first prompt.
        seed = opening.seed if named == len(problem.prompt) else None
        problem = problem._replace(prompt=problem.prompt[:named])
        shared = Shared.of(problem)
        generation = self._history.missing.want(shared.problem, known)
        self._origins[opening.session ^ SECRET] = Origin(shared, seed, generation, tenant)

    async def _open_in_engine(self, opening: wire.Open) -> tuple[int, int, bool]:
        open_session = functools.partial(
            self._engine.open_session,
            opening.problem.namespace,
            opening.prompt,
            problem=opening.problem.name or None,
            generated=opening.generated,
            seed=opening.seed,
            position_noise=opening.position_noise,
        )
        if opening.prompt.size + opening.generated.size <= LONG_OPEN:
            return open_session()
        opened = asyncio.ensure_future(self._history.threads.run("draft", open_session))
        try:
            return await asyncio.shield(opened)
        except asyncio.CancelledError:  # the stream has ended, but the thread continues
            opened.add_done_callback(lambda done: self._engine.close(done.result()[0], commit=False))
            raise

    def commit(self, close: wire.Close, epoch: int) -> Commit | None:
        """Closes a session. Returns its response for the store; the index has it from now on.

        Returns None, and commits nothing, if the session is not open or has not generated `close.generated` tokens.
        """
        origin = self.origin(close.session)
        tokens = self._close(close.session, close.generated, epoch, close.alternatives)
        if origin is None or tokens is None:
            return None
        record = Record(tokens, epoch, close.reward, close.logprobs, seed=origin.seed, alternatives=close.alternatives)
        batch = ResponseBatch(origin.problem, [record])
        self._history.epochs.saw(batch, explicit=close.epoch is not None)
        reservation = self._history.tenants.reserve(origin.tenant, batch.size)
        return Commit(close.session, batch, origin.generation, reservation)

    def forget(self, session: int, generated: int = 0) -> bool:
        """Closes a session without a commit. Returns whether it was open and had generated this many tokens."""
        return self._close(session, generated) is not None

    def _close(
        self, session: int, generated: int, epoch: int | None = None, alternatives: bytes | None = None
    ) -> bytes | None:
        """Returns the tokens, None unless there are `generated` of them. Commits them if `epoch` is given."""
        if (origin := self._origins.pop(session ^ SECRET, None)) is not None:
            self._history.tenants.sessions[origin.tenant] -= 1
        number = self._ids.pop(session ^ SECRET, None)
        if number is None:
            return None
        tokens = self._engine.close(
            number, epoch is not None, epoch=epoch, alternatives=alternatives, expected_length=generated
        )
        return None if tokens is None else tokens.tobytes()

    def forget_all(self) -> "asyncio.Task[None]":
        """Closes all sessions, in slices. Each is in the table until the engine has closed it."""
        return asyncio.ensure_future(slices.close([key ^ SECRET for key in self._ids], self.forget))
