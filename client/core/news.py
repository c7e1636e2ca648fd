"""What the log is told of shards: that one answers, that it does not, and which responses were dropped for it.

Everything is said once, and again once a minute while it lasts.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import grpc

log = logging.getLogger("histospec.client")

PAUSE = 60.0
"""Seconds between two lines about one shard."""


class Outage(NamedTuple):
    """Why a shard gives no drafts, in words."""

    what: str
    """What is wrong where."""
    advice: str
    """What to check or to do; may be empty."""

    @classmethod
    def by_status(cls, where: str, code: grpc.StatusCode, details: str) -> "Outage":
        """As gRPC reports it. `where` names the shard."""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return cls(f"{where} does not let this client in ({details})", "is HISTOSPEC_TOKEN right?")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return cls(
                f"{where} does not let this client in ({details})", "are HISTOSPEC_TOKEN and HISTOSPEC_NAMESPACE right?"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return cls(f"{where} is no HistoSpec server ({details})", "is HISTOSPEC_ENDPOINT right?")
        return cls(f"no drafts from {where} ({code.name}: {details})", "")

    def __str__(self) -> str:
        return f"HistoSpec: {self.what}, going on WITHOUT drafts{'; ' if self.advice else ''}{self.advice}"


class Contact:
    """Whether a shard answers, and what the log knows of it. Not thread-safe; its owner locks."""

    def __init__(self) -> None:
        self.answers = False
        self.code, self.details = grpc.StatusCode.OK, ""
        """How the latest try ended."""
        self._lost: float | None = None  # since when it does not answer, on the monotonic clock
        self._asked = self._told = False  # whether the log is to be told of it, and was
        self._due = -math.inf  # when the log may be told of an outage
        self._met = False  # whether the log knows that it is there
        self._draft = math.inf  # the limit of drafts that the log knows of

    @property
    def lost(self) -> bool:
        """Whether it was tried and did not answer."""
        return self._lost is not None

    def failed(self, code: grpc.StatusCode, details: str, now: float) -> bool:
        """It did not answer. -> whether the log is to be told."""
        self.answers, self.code, self.details = False, code, details
        if self._lost is None:
            self._lost = now
        return self.remind(now)

    def remind(self, now: float) -> bool:
        """-> whether the log is to be told again that it does not answer."""
        if self._lost is None or now < self._due:
            return False
        self._due = now + PAUSE
        self._asked = True
        return True

    def told(self) -> None:
        """The log was told that it does not answer."""
        self._told = True

    def greeted(self) -> None:
        """It answers, and the log was told more about it than `reached` would say."""
        self.answers = self._met = True
        self._lost, self._asked, self._told = None, False, False

    def reached(self, where: str, namespace: str, now: float) -> str | None:
        """It answers. -> a line for the log, where that is news."""
        lost, told, met = self._lost, self._told, self._met
        if self._asked and not told:
            self._due = -math.inf  # it was over before the log was told, which may hear of the next one at once
        self.greeted()
        if lost is not None and told:
            return f"HistoSpec: drafting again after {now - lost:.0f} s, from {where}"
        return None if met else f"HistoSpec: connected to {where}, namespace {namespace}"

    def handed_on(self) -> "Contact":
        """What the log knows of a service is true of the shards that were found at last."""
        heir = Contact()
        heir._lost, heir._told = self._lost, self._told
        return heir

    def cuts(self, asked: int, limit: int) -> bool:
        """More tokens are asked for than it drafts at most. -> whether the log is to be told."""
        if asked <= limit or limit >= self._draft:
            return False
        self._draft = limit
        return True


@dataclass(slots=True)
class _Unsaid:
    due: float
    """When the next line may come, on the monotonic clock."""
    responses: int = 0
    tokens: int = 0
    reason: str = ""


class Losses:
    """Finished responses that were dropped, by shard. Not thread-safe; its owner locks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shards: dict[str, _Unsaid] = {}

    def note(self, shard: str, tokens: int, reason: str) -> None:
        """A response of so many tokens was dropped."""
        unsaid = self._shards.setdefault(shard, _Unsaid(due=self._clock()))
        unsaid.responses += 1
        unsaid.tokens += tokens
        unsaid.reason = reason
        self.report()

    def report(self, all_of_them: bool = False) -> None:
        """Says what is due, or all that was not said yet."""
        for shard, unsaid in self._shards.items():
            now = self._clock()
            if not unsaid.responses or not (all_of_them or now >= unsaid.due):
                continue
            what = "a finished response" if unsaid.responses == 1 else f"{unsaid.responses} finished responses"
            log.warning("HistoSpec: %s: dropped %s of %d tokens: %s", shard, what, unsaid.tokens, unsaid.reason)
            self._shards[shard] = _Unsaid(due=now + PAUSE)
