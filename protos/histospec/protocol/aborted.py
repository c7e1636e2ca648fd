"""Which response a prompt continues: asynchronous trainers abort a generation and send prompt and partial text again.

A worker that aborts a response describes it in a few hundred bytes: how long its prompt is, a digest of its text up to
some place, the anchor, and the tokens after that. The trainer may have received fewer tokens than the engine had made,
so a prompt continues the response if it ends anywhere in these last tokens.

Client and server keep what they were told for an hour, and the newest `LIMIT` responses.
"""

import time
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

Problem = TypeVar("Problem", bound=Hashable)

TAIL = 128
"""Tokens after the anchor: more than an engine makes in the steps between an abort and the trainer's last answer."""
SECONDS = 3600.0
"""How long an aborted response may wait: new weights take minutes at most."""
LIMIT = 16384
"""Responses that one process keeps; each takes less than 1 KiB."""
LINKS = 8
"""Aborted responses that are followed from a prompt: each costs a digest of the text."""
DIGEST = 16  # bytes
TOKEN = 4


class Aborted(NamedTuple):
    """An aborted response, without its text. Lengths are in tokens."""

    prompt: int
    """Length of the prompt."""
    anchor: int
    """Length of the text, prompt included, that the digest covers; at least `prompt`."""
    digest: bytes
    """Of the text up to the anchor, `DIGEST` bytes."""
    tail: bytes
    """int32: the tokens after it, 1 to `TAIL`."""

    @classmethod
    def of(cls, prompt: bytes, generated: bytes | bytearray) -> "Aborted":
        """Describes the response to `prompt` of which `generated`, not empty, was generated; both int32."""
        tail = generated[-TAIL * TOKEN :]
        digest = blake2b(prompt, digest_size=DIGEST)
        digest.update(generated[: len(generated) - len(tail)])
        anchor = (len(prompt) + len(generated) - len(tail)) // TOKEN
        return cls(len(prompt) // TOKEN, anchor, digest.digest(), bytes(tail))


class AbortedResponses(Generic[Problem]):
    """The aborted responses that may still be continued. Not thread-safe.

    Args:
        clock: monotonic clock in seconds.
        tenant: whose responses those of a problem are. Beyond `LIMIT`, the tenant with the most loses its oldest.

    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tenant: Callable[[Problem], str] = lambda _: ""
    ) -> None:
        self._clock = clock
        self._tenant = tenant
        # When each was aborted, the oldest first, by tenant.
        self._since: defaultdict[str, OrderedDict[tuple[Problem, Aborted], float]] = defaultdict(OrderedDict)
        # Tail and prompt of each, in order, by problem, anchor and digest.
        self._anchors: dict[Problem, dict[int, dict[bytes, list[tuple[bytes, int]]]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, problem: Problem, response: Aborted) -> None:
        """Adds a response. `problem`: its explicit name, or what all problems without a name share."""
        since = self._since[self._tenant(problem)]
        key = problem, response
        if key not in since:
            by_digest = self._anchors.setdefault(problem, {}).setdefault(response.anchor, {})
            insort(by_digest.setdefault(response.digest, []), (response.tail, response.prompt))
            self._size += 1
        since[key] = self._clock()
        since.move_to_end(key)
        while self._size > LIMIT:
            most = max(self._since, key=lambda tenant: len(self._since[tenant]))
            self._remove(most, next(iter(self._since[most])))

    def find(self, problem: Problem, text: bytes) -> int | None:
        """Returns how many tokens of `text`, int32, are the prompt of the response that it continues; None: of none."""
        self._expire()
        found, left = None, memoryview(text)
        # A response that was continued and aborted again may be known as two.
        for _ in range(LINKS):
            if (prompt := self._prompt(problem, left)) is None:
                break
            left, found = left[: prompt * TOKEN], prompt
        return found

    def forget(self, belongs: Callable[[Problem], bool]) -> None:
        """Removes the responses of the problems for which `belongs` is true."""
        for tenant in list(self._since):
            for key in [key for key in self._since[tenant] if belongs(key[0])]:
                self._remove(tenant, key)

    def _expire(self) -> None:
        now = self._clock() if self._since else 0.0
        for tenant, since in list(self._since.items()):
            while since and now - next(iter(since.values())) > SECONDS:
                self._remove(tenant, next(iter(since)))

    def _prompt(self, problem: Problem, text: memoryview) -> int | None:
        anchors = self._anchors.get(problem)
        if anchors is None:
            return None
        length = len(text) // TOKEN
        hashed, digest = 0, blake2b(digest_size=DIGEST)
        for anchor in range(max(1, length - TAIL), length):
            if (by_digest := anchors.get(anchor)) is None:
                continue
            digest.update(text[hashed * TOKEN : anchor * TOKEN])
            hashed = anchor
            known = by_digest.get(digest.digest(), [])
            rest = bytes(text[anchor * TOKEN :])
            at = bisect_left(known, (rest, 0))  # tails that begin with the rest follow it
            if at < len(known) and known[at][0].startswith(rest):
                return known[at][1]
        return None

    def _remove(self, tenant: str, key: tuple[Problem, Aborted]) -> None:
        problem, response = key
        del self._since[tenant][key]
        if not self._since[tenant]:
            del self._since[tenant]
        self._size -= 1
        anchors = self._anchors[problem]
        by_digest = anchors[response.anchor]
        known = by_digest[response.digest]
        del known[bisect_left(known, (response.tail, response.prompt))]
        if not known:
            del by_digest[response.digest]
        if not by_digest:
            del anchors[response.anchor]
        if not anchors:
            del self._anchors[problem]
