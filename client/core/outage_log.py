"""Decides when to log that a shard answers, that it does not, and that responses for it were dropped.

Each fact is logged once, and again once a minute while it lasts.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from histospec.client.errors import printable

log = logging.getLogger("histospec.client")

PAUSE = 60.0
"""Seconds between two lines about one shard."""
LONGEST = 300
"""Characters of a server's text in a line."""


def short(text: str) -> str:
    """Returns a server's text for a line of the log: without control characters, and not too long."""
    return printable(text if len(text) <= LONGEST else text[:LONGEST] + "...")


class Outage(NamedTuple):
    """Why a shard gives no drafts, in words."""

    what: str
    """What is wrong, and where."""
    advice: str
    """What to check or do; may be empty."""

    @classmethod
    def by_status(cls, where: str, code: grpc.StatusCode, details: str) -> "Outage":
        """Returns the outage for a status of gRPC. `where` names the shard."""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return cls(f"{where} does not let this client in ({details})", "is HISTOSPEC_TOKEN right?")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return cls(
                f"{where} does not let this client in ({details})", "are HISTOSPEC_TOKEN and HISTOSPEC_NAMESPACE right?"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return cls(f"{where} is not a HistoSpec server ({details})", "is HISTOSPEC_ENDPOINT right?")
        if code is grpc.StatusCode.DATA_LOSS:
            what = f"no drafts from {where} ({code.name}: {details})"
            return cls(what, "do the server and this client have the same version?")
        return cls(f"no drafts from {where} ({code.name}: {details})", "")

    def __str__(self) -> str:
        return f"HistoSpec: {self.what}, going on WITHOUT drafts{'; ' if self.advice else ''}{self.advice}"


class Contact:
    """Whether a shard answers, and what was logged about it. Not thread-safe; its owner locks."""

    def __init__(self) -> None:
        self.answers = False
        self.code, self.details = grpc.StatusCode.OK, ""
        """How the latest try ended."""
        self.asked = 0
        """Steps with a wish for drafts."""
        self.in_time = False
        """Whether it answered one of them within the deadline."""
        self._warned = False  # whether the log says that it did not
        self._lost: float | None = None  # since when it does not answer, on the monotonic clock
        self._line_due = self._logged = False  # whether a line about the outage is due, and whether it was logged
        self._due = -math.inf  # when the next line about an outage may be logged
        self._refused = 0  # sessions that no line has named
        self._refusal_due = -math.inf
        self._met = False  # whether the log says that it answers
        self._draft = math.inf  # the smallest limit of drafts that was logged
        self._old_due = -math.inf  # when the next line about responses that are too old may be logged

    @property
    def logged(self) -> bool:
        """Whether the outage was logged."""
        return self._logged

    @property
    def line_due(self) -> bool:
        """Whether the log waits for the reason of the outage."""
        return self._line_due

    @property
    def lost(self) -> bool:
        """Whether the client tried the shard and got no answer."""
        return self._lost is not None

    def outage(self, where: str) -> Outage:
        """Returns why it does not answer, by the status that gRPC reported. `where` names the shard."""
        return Outage.by_status(where, self.code, self.details)

    def failed(self, code: grpc.StatusCode, details: str, now: float) -> bool:
        """Notes that it did not answer. Returns whether to log it now."""
        self.answers, self.code, self.details = False, code, short(details)
        if self._lost is None:
            self._lost = now
        return self.remind(now)

    def remind(self, now: float) -> bool:
        """Returns whether to log again that it does not answer."""
        if self._lost is None or now < self._due:
            return False
        self._due = now + PAUSE
        self._line_due = True
        return True

    def mark_logged(self) -> None:
        """Notes that the outage was logged."""
        self._logged, self._line_due = True, False

    def answered(self) -> None:
        """Notes that it answers; `reached` logs nothing about it."""
        self.answers = self._met = True
        self._lost, self._line_due, self._logged = None, False, False

    def reached(self, where: str, namespace: str, now: float) -> str | None:
        """Notes that it answers. Returns a line for the log if that is news, else None."""
        lost, logged, met = self._lost, self._logged, self._met
        if self._line_due and not logged:
            self._due = -math.inf  # the outage ended before it was logged, so the next one may be logged at once
        self.answered()
        if lost is not None and logged:
            return f"HistoSpec: drafting again after {now - lost:.0f} s, from {where}"
        return None if met else f"HistoSpec: connected to {where}, namespace {namespace}"

    def refused(self, number: int, reason: str, sessions: int, now: float) -> str | None:
        """Notes that it refused sessions, one of them for a reason. Returns a line for the log if one is due."""
        self._refused += sessions
        if now < self._refusal_due:
            return None
        others = f" and {self._refused - 1} more are" if self._refused > 1 else " is"
        self._refused, self._refusal_due = 0, now + PAUSE
        return f"session {number}{others} refused: {reason}"

    def first_unanswered(self, where: str, deadline: float) -> str:
        """Returns a line that says that it answered no step, once; empty if it did."""
        if self.in_time or self._warned:
            return ""
        self._warned = True
        return self._unanswered(where, deadline)

    def last_line(self, where: str, deadline: float) -> "str | Outage":
        """Returns a line for the end of the client: why it answered no step; empty if it did, or if that is logged."""
        if not self.asked or self.in_time or self._logged:
            return ""
        if not self.lost:
            return self._unanswered(where, deadline)
        self.mark_logged()
        return self.outage(where)

    def _unanswered(self, where: str, deadline: float) -> str:
        return (
            f"HistoSpec: {where} answered none of {self.asked} step{'' if self.asked == 1 else 's'} within "
            f"{deadline:g} s, so there were NO drafts; is the machine busy? Raise HISTOSPEC_DEADLINE, or run "
            "`histospec doctor`"
        )

    def handed_on(self) -> "Contact":
        """Returns a contact for a shard that was found, with what was logged about the service before."""
        heir = Contact()
        heir._lost, heir._logged = self._lost, self._logged
        return heir

    def too_old(self, now: float) -> bool:
        """Returns whether to log that the shard did not keep responses because they are too old."""
        if now < self._old_due:
            return False
        self._old_due = now + PAUSE
        return True

    def cuts(self, asked: int, limit: int) -> bool:
        """Returns whether to log that the shard drafts fewer tokens than the client asks for."""
        if asked <= limit or limit >= self._draft:
            return False
        self._draft = limit
        return True


@dataclass(slots=True)
class _Unlogged:
    due: float
    """When the next line may come, on the monotonic clock."""
    responses: int = 0
    tokens: int = 0
    reason: str = ""


class Losses:
    """Finished responses that were dropped, by shard. Not thread-safe; its owner locks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shards: dict[str, _Unlogged] = {}

    def note(self, shard: str, tokens: int, reason: str, responses: int = 1) -> None:
        """Counts dropped responses of `tokens` tokens together, and logs them if a line is due."""
        unlogged = self._shards.setdefault(shard, _Unlogged(due=self._clock()))
        unlogged.responses += responses
        unlogged.tokens += tokens
        unlogged.reason = reason
        self.report()

    def report(self, all_of_them: bool = False) -> None:
        """Logs the losses of shards whose next line is due, or of all shards."""
        for shard, unlogged in self._shards.items():
            now = self._clock()
            if not unlogged.responses or not (all_of_them or now >= unlogged.due):
                continue
            what = "a finished response" if unlogged.responses == 1 else f"{unlogged.responses} finished responses"
            log.warning("HistoSpec: %s: lost %s of %d tokens: %s", shard, what, unlogged.tokens, unlogged.reason)
            self._shards[shard] = _Unlogged(due=now + PAUSE)
