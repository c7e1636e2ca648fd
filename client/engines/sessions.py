"""The draft sessions of an engine's requests: the tokens sent, the drafts, and the end of each.

A session must be sent exactly the tokens that its request generated, or the history would hold text that the policy did
not write. So every session counts the tokens sent, and the caller compares. A session that was sent more than its
request kept starts again from the request's own tokens.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from histospec.client.engines.alternatives import Gathered, Step
from histospec.client.engines.options import RequestOptions
from histospec.client.engines.versions import Version
from histospec.protocol.costs import DEFAULT_VERIFY_COST

if TYPE_CHECKING:
    from histospec.client import Draft, DraftClient, Pending

REPORT_SECONDS = 1.0  # between two messages while drafts cost too much to verify any
WHOLE = 1024  # as the number of verified tokens: the whole draft, however long


class Verified(NamedTuple):
    """What a step verified of a request's drafts.

    Attributes:
        request: the id of the request.
        history: how many tokens of the server's draft, from its first on.
        drafted: how many tokens of the model's draft beyond those that the server drafted, too.
        accepted: how many of the latter were accepted.
    """

    request: str
    history: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class _RequestSession:
    id: int
    prompt: Sequence[int]
    options: RequestOptions
    sent: int = 0  # generated tokens of the request that were sent, those on their way included
    verified: int = 0  # tokens of the last draft, verified since the last report to the server
    model_drafted: int = 0  # tokens of the model's own drafter, verified since then
    model_accepted: int = 0
    alternatives: Gathered | None = None  # of its sampled tokens, if coupled sampling gives any


class RequestSessions:
    """Sessions by request id. Not thread-safe: it belongs to the scheduler's thread."""

    def __init__(
        self, client: "DraftClient", max_tokens: int, position_noise: bool = False, runners_up: bool = False
    ) -> None:
        """Takes the client, the length of the longest draft, and what drafts have.

        `position_noise`: whether the noise of a seed is of the position. `runners_up`: see `DraftClient.step`.
        """
        self.client = client
        self._asking: dict[str, Any] = {"runners_up": True} if runners_up else {}
        self._position_noise = position_noise
        self.max_tokens = max_tokens
        self.verify_cost = DEFAULT_VERIFY_COST  # sent with steps that ask for no drafts, for the server's metrics
        self._sessions: dict[str, _RequestSession] = {}
        self._new: set[int] = set()  # sessions that no message has opened yet
        self._noted: set[int] = set()  # sessions whose next message reports what was verified
        self._pending: list[tuple[list[str], Pending]] = []
        self._probe: Pending | None = None  # a step whose drafts nothing verifies
        # Sessions of finished requests: those to commit with their last tokens, and those to close without.
        self._commits: list[tuple[_RequestSession, Sequence[int], Version]] = []
        self._drops: list[_RequestSession] = []
        self._aborts: list[tuple[_RequestSession, Sequence[int]]] = []  # those that another request may continue

    def begin(self, request_id: str, prompt: Sequence[int], options: RequestOptions) -> None:
        """Opens the request's session; the next message carries it."""
        begun = len(prompt) - (options.generated or 0)
        (session,) = self.client.open(
            [prompt[:begun]], [options.problem], [prompt[begun:]], [options.seed], self._position_noise
        )
        self._sessions[request_id] = _RequestSession(session, prompt, options)
        self._new.add(session)

    def announce(self) -> None:
        """Sends the new sessions, so that the server looks them up during the forward pass. Never waits."""
        if self._new:
            opened, self._new = sorted(self._new), set()
            # An empty step and not a flush, which would wait for earlier commits to reach the server's disk.
            self._send(opened, [()] * len(opened))

    def sent(self, request_id: str) -> int | None:
        """Returns how many generated tokens the request's session was sent; None for a request without one."""
        session = self._sessions.get(request_id)
        return None if session is None else session.sent

    def verified(self, steps: Iterable[Verified]) -> None:
        """Notes what a step verified with drafts of the model's own drafter, for the next message to the server."""
        for step in steps:
            if (session := self._sessions.get(step.request)) is not None:
                self._noted.add(session.id)
                session.verified = step.history
                session.model_drafted += step.drafted
                session.model_accepted += step.accepted

    def keep(self, request_id: str, start: int, step: Step) -> None:
        """Keeps the alternatives of the tokens that the request got from its output token `start` on."""
        if (session := self._sessions.get(request_id)) is not None:
            session.alternatives = session.alternatives or Gathered()
            session.alternatives.put(start, step)

    def ask(self, tokens: Mapping[str, Sequence[int]], verify_cost: float) -> None:
        """Sends the new tokens of requests and asks for drafts, which `collect` returns. Never waits."""
        sessions, verified = self._advance(tokens)
        if sessions:
            new = list(tokens.values())
            step = self.client.send(sessions, new, self.max_tokens, verify_cost, **verified, **self._asking)
            self._pending.append((list(tokens), step))

    def report(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Sends the new tokens of requests for siblings on other engines. Asks for no drafts."""
        sessions, verified = self._advance(tokens)
        if sessions:
            self._send(sessions, list(tokens.values()), verified)

    def probe(self, tokens: Mapping[str, Sequence[int]], verify_cost: float) -> None:
        """As `ask`, for drafts that no step verifies. The next message of these sessions reports that."""
        sessions, verified = self._advance(tokens, report=True)  # or the server counts them as verified
        if sessions:
            self._probe = self.client.send(sessions, list(tokens.values()), self.max_tokens, verify_cost, **verified)
            self._noted.update(sessions)

    def probed(self) -> "Sequence[Draft]":
        """Returns the drafts of the last probe, once; empty: there is none. Waits at most the client's deadline."""
        probe, self._probe = self._probe, None
        return () if probe is None else self.client.receive(probe)

    def collect(self) -> "dict[str, Draft]":
        """Returns the drafts asked for since the last call, by request id. Waits at most the client's deadline."""
        drafts: dict[str, Draft] = {}
        for requests, step in self.pending():
            drafts.update(zip(requests, self.client.receive(step), strict=True))
        return drafts

    def collect_tokens(self, vocabulary: int) -> dict[str, list[int]]:
        """Returns the tokens of what `collect` would return. A draft that is not of this vocabulary is empty."""
        tokens: dict[str, list[int]] = {}
        for requests, step in self.pending():
            self.client.wait(step)
            tokens.update(zip(requests, step.tokens(vocabulary), strict=True))
        return tokens

    def pending(self) -> "list[tuple[list[str], Pending]]":
        """Returns the steps that asked for drafts since the last call, for a caller that receives them itself."""
        pending, self._pending = self._pending, []
        return pending

    def restart(self, request_id: str) -> None:
        """Opens a new session for a request: the old one was sent tokens that the request did not keep."""
        session = self._sessions.pop(request_id)
        self._drops.append(session)
        self.begin(request_id, session.prompt, session.options)
        self._sessions[request_id].alternatives = session.alternatives

    def finish(self, request_id: str, output: Sequence[int] | None, version: Version, whole: bool = True) -> None:
        """Ends the request's session.

        Args:
            request_id: the id of a request, with or without a session.
            output: exactly the tokens to add to the history; None or empty: none.
            version: the weights that wrote the last of them.
            whole: False if the request was aborted: a request whose prompt continues its text brings the rest.
        """
        session = self._sessions.get(request_id)
        if session is None:
            return
        if output and session.sent > len(output):
            self.restart(request_id)
            session = self._sessions[request_id]
        del self._sessions[request_id]
        self._new.discard(session.id)
        if not output or session.options.commit is False:
            self._drops.append(session)
        elif whole:
            self._commits.append((session, output[session.sent :], version))
        else:
            self._aborts.append((session, output[session.sent :]))

    def settle(self) -> None:
        """Sends the last tokens of finished requests and closes their sessions.

        The closes go out with the next step, without a wait. After the last session there may be no next step for
        long. Then this call sends them and waits until the server has them, at most the client's deadline.
        """
        commits, self._commits = self._commits, []
        drops, self._drops = self._drops, []
        aborts, self._aborts = self._aborts, []
        if not (commits or drops or aborts):
            return
        tails = [(session, tail) for session, tail in (*((s, t) for s, t, _ in commits), *aborts) if tail]
        if tails:
            verified = self._take_verified([session for session, _ in tails])
            self._send([session.id for session, _ in tails], [tail for _, tail in tails], verified)
        ended = [*drops, *(session for session, _, _ in commits), *(session for session, _ in aborts)]
        self._noted.difference_update([session.id for session in ended])
        if commits:
            said = [session.options.epoch for session, _, _ in commits]
            self.client.finish(
                [session.id for session, _, _ in commits],
                commit=True,
                epochs=[v.epoch if epoch is None else epoch for epoch, (_, _, v) in zip(said, commits, strict=True)],
                changes=[version.changes for _, _, version in commits],
                alternatives=_alternatives(commits),
            )
        if drops:
            self.client.finish([session.id for session in drops], commit=False)
        if aborts:
            self.client.finish([session.id for session, _ in aborts], commit=False, aborted=True)
        if not self.running:
            self.client.flush()

    @property
    def running(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._sessions)

    def forget(self) -> None:
        """Gives up every session after a failure: the requests go on without drafts and are not committed."""
        lost = [*self._sessions.values(), *self._drops, *(session for session, _, _ in self._commits)]
        lost += [session for session, _ in self._aborts]
        self._sessions.clear()
        self._pending.clear()
        self._probe = None
        self._commits.clear()
        self._drops.clear()
        self._aborts.clear()
        self._new.clear()
        self._noted.clear()
        with contextlib.suppress(Exception):  # the failure that led here may happen again
            self.client.finish([session.id for session in lost], commit=False)

    def shut_down(self) -> None:
        """Sends the last commits and ends the client."""
        self.settle()
        self.client.shutdown()

    def _advance(self, tokens: Mapping[str, Sequence[int]], report: bool = False) -> tuple[list[int], dict[str, Any]]:
        """Counts tokens as sent. Returns the sessions of the requests, and what was verified of their drafts.

        `report`: as for `_take_verified`.
        """
        advanced = [self._sessions[request_id] for request_id in tokens]
        for session, new in zip(advanced, tokens.values(), strict=True):
            session.sent += len(new)
        sessions = [session.id for session in advanced]
        if self._new:
            self._new.difference_update(sessions)
        return sessions, self._take_verified(advanced, report)

    def _take_verified(self, sessions: Sequence[_RequestSession], report: bool = False) -> dict[str, Any]:
        """Returns what was verified of the sessions' drafts, as arguments of `send`.

        {}: all of them in full, which the server assumes. `report`: name the numbers even then.
        """
        noted = self._noted.intersection([session.id for session in sessions]) if self._noted else ()
        if not (report or noted):
            return {}
        told = {name: [getattr(session, name) for session in sessions] for name in ("model_drafted", "model_accepted")}
        told["verified"] = [session.verified if session.id in noted else WHOLE for session in sessions]
        self._noted.difference_update(noted)
        for session in sessions:
            session.verified = session.model_drafted = session.model_accepted = 0
        return told

    def _send(
        self, sessions: list[int], tokens: Sequence[Sequence[int]], verified: Mapping[str, Any] | None = None
    ) -> None:
        # No caller receives this step.
        self.client.send(sessions, tokens, max_tokens=0, verify_cost=self.verify_cost, **(verified or {}))


def known(draft: "Draft | None", vocabulary: int) -> "Draft | None":
    """Returns the draft; None if it is empty, or has tokens outside the vocabulary, perhaps of another tokenizer."""
    tokens = [] if draft is None else draft.tokens.tolist()  # of so few, lists are faster than arrays
    return draft if tokens and max(tokens) < vocabulary else None


def _alternatives(commits: "Sequence[tuple[_RequestSession, Sequence[int], Version]]") -> list[bytes | None] | None:
    """Returns the alternatives of finished responses for `finish`; None if no response has any."""
    packed: list[bytes | None] = []
    for session, tail, _ in commits:
        before = session.options.generated or 0
        tokens = before + session.sent + len(tail)
        packed.append(None if session.alternatives is None else session.alternatives.packed(before, tokens))
    return packed if any(packed) else None
