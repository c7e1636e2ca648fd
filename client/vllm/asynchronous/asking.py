"""Asks the server for a worker's drafts: at the start of a step, for the texts as the step before left them.

    step k:   forward, sample ──► copies of the sampled tokens to the host (vLLM's own)
    step k+1: scheduled while k runs ──► `Asking.step`: wait for these copies, send, receive ──► verified by k+1

A step without places waits for no answer of its own: it sends only what has arrived already, and the next step takes
the answers.
A late answer is kept. It names the length of the text that it was made for, so that a later step can cut off what was
sampled since, if the two agree.

The client has no thread: its loop turns while a caller waits, and a helper thread costs the worker 300 us more.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from histospec.client.engines.harmless import Harmless
from histospec.client.engines.options import Bounds, RequestOptions
from histospec.client.engines.sessions import REPORT_SECONDS, RequestSessions, Verified, known
from histospec.client.engines.versions import Version
from histospec.client.vllm.asynchronous.messages import Answers
from histospec.client.vllm.asynchronous.texts import Text
from histospec.protocol.costs import DEFAULT_VERIFY_COST

if TYPE_CHECKING:
    from histospec.client import Draft, DraftClient, Pending

STEPS_LATE = 4  # an answer that is later than so many steps has nothing left


class Begun(NamedTuple):
    """A request that begins or resumes.

    Attributes:
        request: its id.
        text: its prompt, and what it has generated so far.
        generated: how many of these tokens it has generated itself.
        options: the options of the request.
        bounds: the lengths between which its response may end.
    """

    request: str
    text: Sequence[int]
    generated: int
    options: RequestOptions
    bounds: Bounds


class Sampled(NamedTuple):
    """The outcome of a step, whose tokens are on their way to the host.

    Attributes:
        texts: of the requests of the step; None for one without a session.
        tokens: waits for the tokens, and returns those of each request.
    """

    texts: list[Text | None]
    tokens: Callable[[], Sequence[Sequence[int]]]


@dataclass(slots=True, eq=False)
class _Asked:
    step: int
    texts: list[Text]
    ends: list[int]  # the length of each
    pending: "Pending"
    taken: set[int] = field(default_factory=set)  # rows whose drafts have arrived


class Asking:
    """The draft sessions of one worker. Not thread-safe. A failure is logged; the requests go on without drafts."""

    def __init__(self, client: "DraftClient", longest: int, vocabulary: int) -> None:
        """Takes the client, the longest draft in tokens, and the size of the vocabulary."""
        self._sessions = RequestSessions(client, longest, position_noise=True)
        self._longest, self._vocabulary = longest, vocabulary
        self._kept = STEPS_LATE * (longest + 1)  # tokens of a text
        self._texts: dict[str, Text] = {}
        self._sampled: list[Sampled] = []  # steps whose tokens the server was not sent, oldest first
        self._waiting: list[_Asked] = []  # steps whose drafts have not arrived, oldest first
        self._unsent: dict[str, list[int]] = {}  # tokens that no message has brought yet
        self._answers = 0
        self._reported = -np.inf
        self._harmless = Harmless(self._forget)

    def sampled(self, requests: Iterable[str], tokens: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Takes the outcome of a step whose forward pass was launched; see `Sampled`."""
        self._sampled.append(Sampled([self._texts.get(each) for each in requests], tokens))

    def step(
        self,
        number: int,
        ended: Iterable[str],
        begun: Iterable[Begun],
        places: Mapping[str, int],
        verify_cost: float | None,
        value: float = DEFAULT_VERIFY_COST,
    ) -> "tuple[dict[str, Draft], list[Answers]]":
        """Returns the drafts that the step verifies, at most as long as their places, and all new answers.

        Waits for the outcome of the step before and then at most the client's deadline; without places, only for drafts
        that an earlier step asked for.

        Args:
            number: the number of the step.
            ended: requests that have ended or were preempted.
            begun: requests that begin or resume.
            places: how many tokens the step can verify, of each request that can verify any.
            verify_cost: the cost to ask for drafts with; None: ask for none.
            value: the cost of a drafted token, which the server shows while none is asked for.
        """
        self._sessions.verify_cost = value
        drafts: dict[str, Draft] = {}
        answers = []
        with self._harmless("draft", forget=True):
            for request in ended:
                self._end(request)
            for each in begun:
                self._begin(each)
            self._gather(all_of_them=bool(places))
            if verify_cost is None:
                self._report()
            else:
                self._ask(number, places, verify_cost)
            answers = self._receive(number, wait=bool(places))
            drafts = self._fitting(places)
            self._sessions.announce()
            self._sessions.settle()
        return drafts, answers

    def shut_down(self) -> None:
        """Closes all sessions, and ends the client."""
        with self._harmless("shutdown"):
            for request in list(self._texts):
                self._end(request)
            self._sessions.shut_down()

    def _begin(self, begun: Begun) -> None:
        self._end(begun.request)  # the next input of a streaming session
        options = begun.options._replace(generated=(begun.options.generated or 0) + begun.generated)
        self._sessions.begin(begun.request, list(begun.text), options)
        self._texts[begun.request] = Text(begun.request, begun.generated, begun.bounds)

    def _end(self, request: str) -> None:
        if (text := self._texts.pop(request, None)) is not None:
            text.ended = True
            self._unsent.pop(request, None)
            self._sessions.finish(request, None, Version())  # the scheduler commits it

    def _gather(self, all_of_them: bool) -> None:
        """Takes the tokens of the steps; without the newest one's, for which the host would wait."""
        ready = len(self._sampled) if all_of_them else len(self._sampled) - 1
        for texts, tokens in self._sampled[: max(ready, 0)]:
            for text, new in zip(texts, tokens(), strict=True):
                if new and text is not None and not text.ended:
                    text.grow(new, self._kept)
                    self._unsent.setdefault(text.request, []).extend(new)
        del self._sampled[: max(ready, 0)]

    def _ask(self, number: int, places: Mapping[str, int], verify_cost: float) -> None:
        if not self._unsent:
            return
        rows = self._take_unsent()
        texts = [self._texts[each] for each in rows]
        self._sessions.ask(rows, verify_cost)
        for text in texts:
            text.places = min(places.get(text.request, 0), text.room)
        if not places:
            self._reported = -np.inf  # a step without drafts follows, whose cost the server shows
        ends = [text.length for text in texts]
        self._waiting += [_Asked(number, texts, ends, pending) for _, pending in self._sessions.pending()]

    def _report(self) -> None:
        now = time.monotonic()
        if self._unsent and now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._sessions.report(self._take_unsent())

    def _take_unsent(self) -> dict[str, list[int]]:
        """Returns the tokens of the next message, and notes for it how much of the last drafts the steps verified.

        The server assumes that they verified all.
        """
        rows, self._unsent = self._unsent, {}
        texts = [self._texts[each] for each in rows]
        self._sessions.verified(
            Verified(text.request, text.places, 0, 0) for text in texts if text.places < self._longest
        )
        for text in texts:
            text.places = 0
        return rows

    def _receive(self, number: int, wait: bool) -> list[Answers]:
        """Takes the drafts that have arrived: those of earlier steps, and with `wait`, those of this one.

        The client reads the network only while a caller waits. The wait ends at the client's deadline.
        """
        waited = 0.0
        for asked in self._waiting:
            if not asked.pending.done and (wait or asked.step < number):
                waited -= time.perf_counter()
                self._sessions.client.receive(asked.pending)  # or notes that they are late
                waited += time.perf_counter()
        answers = [answer for asked in self._waiting if (answer := self._take(asked, waited)) is not None]
        self._waiting = [asked for asked in self._waiting if len(asked.taken) < len(asked.texts)][-STEPS_LATE:]
        return answers

    def _take(self, asked: _Asked, waited: float) -> Answers | None:
        rows = [row for row in asked.pending.answered() if row not in asked.taken]
        if not rows:
            return None
        asked.taken.update(rows)
        drafts = asked.pending.drafts()
        for row in rows:
            asked.texts[row].take(drafts[row], asked.ends[row])
        self._answers += 1
        return Answers(
            number=self._answers,
            step=asked.step,
            lengths=[len(drafts[row]) for row in rows],
            probs=np.concatenate([drafts[row].probs for row in rows]),
            waited=waited,
        )

    def _fitting(self, places: Mapping[str, int]) -> "dict[str, Draft]":
        """Returns the drafts for the present texts, cut to their places and to what their requests can use."""
        found = {}
        for request, number in places.items():
            text = self._texts.get(request)
            if text is None or not (most := min(number, text.room)):
                continue
            if (draft := known(text.fitting, self._vocabulary)) is not None:
                found[request] = type(draft)(draft.tokens[:most], draft.probs[:most])
        return found

    def _forget(self) -> None:
        for text in self._texts.values():
            text.ended = True
        for left in (self._texts, self._sampled, self._waiting, self._unsent):
            left.clear()
        self._sessions.forget()
