"""Which response a prompt continues: asynchronous trainers abort a generation and send prompt and partial text again.

A worker that aborts a response describes it in a few hundred bytes: how long its prompt is, a digest of its text up to
some place, the anchor, and the tokens after that. The trainer may have received fewer tokens than the engine had made,
so a prompt continues the response if it ends anywhere in these last tokens.

Client and server keep what they were told for an hour, and the newest `LIMIT` responses.
"""

import time
from collections import OrderedDict
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

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The oldest first: when each was aborted, by problem and response.
        self._since: OrderedDict[tuple[Problem, Aborted], float] = OrderedDict()
        self._anchors: dict[Problem, dict[int, dict[bytes, list[Aborted]]]] = {}  # by problem, anchor and digest

    def __len__(self) -> int:
        return len(self._since)

    def add(self, problem: Problem, response: Aborted) -> None:
        """Adds a response. `problem`: its explicit name, or what all problems without a name share."""
        key = problem, response
        if key not in self._since:
            by_digest = self._anchors.setdefault(problem, {}).setdefault(response.anchor, {})
            by_digest.setdefault(response.digest, []).append(response)
        self._since[key] = self._clock()
        self._since.move_to_end(key)
        while len(self._since) > LIMIT:
            self._remove(next(iter(self._since)))

    def find(self, problem: Problem, text: bytes) -> int | None:
        """Returns how many tokens of `text`, int32, are the prompt of the response that it continues; None: of none."""
        while self._since and self._clock() - next(iter(self._since.values())) > SECONDS:
            self._remove(next(iter(self._since)))
        found = None
        # A response that was continued and aborted again may be known as two.
        while (prompt := self._prompt(problem, text)) is not None:
            text, found = text[: prompt * TOKEN], prompt
        return found

    def forget(self, belongs: Callable[[Problem], bool]) -> None:
        """Removes the responses of the problems for which `belongs` is true."""
        for key in [key for key in self._since if belongs(key[0])]:
            self._remove(key)

    def _prompt(self, problem: Problem, text: bytes) -> int | None:
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
            for response in by_digest.get(digest.digest(), ()):
                if response.tail.startswith(text[anchor * TOKEN :]):
                    return response.prompt
        return None

    def _remove(self, key: tuple[Problem, Aborted]) -> None:
        problem, response = key
        del self._since[key]
        anchors = self._anchors[problem]
        by_digest = anchors[response.anchor]
        by_digest[response.digest].remove(response)
        if not by_digest[response.digest]:
            del by_digest[response.digest]
        if not by_digest:
            del anchors[response.anchor]
        if not anchors:
            del self._anchors[problem]
