"""The open sessions of a client, and the shard that owns the problem of each."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from histospec.client.core.commits import Commit
from histospec.client.core.session import Session
from histospec.client.core.shard import Shard
from histospec.protocol.aborted import Aborted, AbortedResponses
from histospec.v1 import draft_pb2 as pb


class OpenSessions:
    """Not thread-safe; the core locks.

    Args:
        namespace: of all sessions.
        owner: returns the present owner of a session's problem.
        clock: returns seconds that never decrease.
    """

    def __init__(self, namespace: str, owner: Callable[[Session], Shard], clock: Callable[[], float]) -> None:
        self.by_number: dict[int, Session] = {}
        self._owners: dict[int, Shard] = {}
        self._namespace = namespace
        self._owner = owner
        self._clock = clock
        self._aborted: AbortedResponses[str] = AbortedResponses(clock)  # by problem id

    def begin(self, sessions: Sequence[Session]) -> None:
        """Opens sessions; those that continue an aborted response belong to its problem."""
        self.by_number.update({session.number: session for session in sessions})
        for session in sessions:
            if (first := self._aborted.find(session.problem, session.prompt)) is not None:
                session.resume(first)
            shard = self._owners[session.number] = self._owner(session)
            shard.open(session)

    def continues(self, prompt: bytes) -> bool:
        """Returns whether a prompt continues a response, of a problem without an explicit id, that was aborted."""
        return self._aborted.find("", prompt) is not None

    def end(self, sessions: Iterable[Session], commits: Iterable[Commit]) -> None:
        """Ends sessions, some of them with a response to commit."""
        kept = {c.session.number: c for c in commits}
        for session in sessions:
            shard = self._owners.pop(session.number, None)
            if self.by_number.pop(session.number, None) is None or shard is None:
                continue
            if (c := kept.get(session.number)) is None:
                shard.forget(session)
            else:
                shard.commit(c)

    def abort(self, sessions: Iterable[Session], shards: Iterable[Shard]) -> None:
        """Lets the responses of sessions go on in other ones, of this or another client."""
        for session in sessions:
            if not session.generated:
                continue
            response = Aborted.of(session.prompt, session.generated)
            self._aborted.add(session.problem, response)
            message = pb.AbortedResponse(namespace=self._namespace, problem=session.problem, **response._asdict())
            for shard in shards:
                shard.abort(session, message)

    def move(self, session: Session) -> None:
        """Gives a session to the present owner of its problem, which begins to read the history."""
        self._owners[session.number].forget(session)
        self._owners[session.number] = owner = self._owner(session)
        owner.open(session)

    def move_all(self) -> None:
        """Moves the sessions whose problems have other owners now."""
        for session in self.by_number.values():
            if self._owner(session) is not self._owners[session.number]:
                self.move(session)

    def renew(self) -> None:
        """Makes everything anew that follows from the sessions, after an interrupt. May be interrupted itself."""
        self._aborted = AbortedResponses(self._clock)  # the shards know them, too
        self._owners.clear()
        for session in self.by_number.values():
            shard = self._owners[session.number] = self._owner(session)
            if not session.opened:
                shard.open(session)

    def by_shard(self, chosen: Sequence[Session]) -> dict[Shard | None, list[int]]:
        """Returns the rows of the sessions of each shard that owns some of these; of refused sessions under None."""
        rows: dict[Shard | None, list[int]] = defaultdict(list)
        owners = self._owners
        for row, session in enumerate(chosen):
            rows[None if session.refused else owners[session.number]].append(row)
        return rows
