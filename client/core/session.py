"""The client's copies of the open sessions: enough to open them again on a server that has forgotten them."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments
from histospec.client.errors import UnknownSession
from histospec.client.values import Tokens


class Session:
    """One running generation. Keeps its tokens in the format of the wire: little-endian int32 bytes."""

    __slots__ = (
        "_appending", "_generated", "continued", "length", "number", "opened", "position_noise", "problem", "prompt",
        "refused", "seed", "unreported",
    )  # fmt: skip

    def __init__(
        self,
        appending: "Appending",
        number: int,
        prompt: bytes,
        problem: str,
        generated: bytes = b"",
        seed: int | None = None,
        position_noise: bool = False,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.problem = problem
        self._appending = appending
        self._generated = bytearray(generated)
        self.length = len(generated) // 4  # in tokens; stored, because every step reads it for each session
        self.seed = seed
        self.position_noise = position_noise
        self.continued = 0
        """How many of the generated tokens, the first ones, an aborted response had before; the caller did not."""
        self.opened = False
        self.refused = False
        self.unreported: NDArray[np.int32] | None = None
        """The sum of the rows of `StepInput.report` of steps that were not sent."""

    @property
    def generated(self) -> bytearray:
        """Its generated tokens."""
        self._appending.copy()
        return self._generated

    @property
    def own(self) -> int:
        """How many tokens it has generated, without those of the aborted response that it continues."""
        return self.length - self.continued

    def resume(self, prompt: int) -> None:
        """Continues an aborted response, whose prompt are the first `prompt` tokens of this session's."""
        first, taken = self.prompt[: 4 * prompt], self.prompt[4 * prompt :]
        generated, tokens = bytearray(taken + self.generated), len(taken) // 4
        length, continued = self.length + tokens, self.continued + tokens
        # One line, which no interrupt divides. A seed draws the rest, not the whole response.
        self.prompt, self._generated, self.length, self.continued, self.seed = first, generated, length, continued, None

    @property
    def bytes(self) -> int:
        """The approximate bytes of its open on the wire."""
        return len(self.prompt) + 4 * self.length


def prepare(
    appending: "Appending",
    numbers: "itertools.count[int]",
    prompts: Sequence[Tokens],
    problems: Sequence[str | None] | None = None,
    generated: Sequence[Tokens] | None = None,
    seeds: Sequence[int | None] | None = None,
    position_noise: bool = False,
) -> list[Session]:
    """Returns a session for each prompt, with the next numbers. Raises ValueError, naming the malformed argument."""
    arguments.listed("prompts", prompts, arguments.PROMPTS)
    arguments.flag("position_noise", position_noise)
    each = partial(arguments.for_each, other="prompts", size=len(prompts))
    given = each("problems", problems, arguments.PROBLEMS)
    pieces = each("generated", [()] * len(prompts) if generated is None else generated, arguments.TOKEN_LISTS)
    drawn = arguments.seed_numbers("seeds", each("seeds", seeds, arguments.SEEDS))
    texts = [arguments.token_bytes(f"prompts[{i}]", p, empty=False) for i, p in enumerate(prompts)]
    names = [arguments.problem_name(f"problems[{i}]", p) for i, p in enumerate(given)]
    begun = [arguments.token_bytes(f"generated[{i}]", g) for i, g in enumerate(pieces)]
    return [
        Session(appending, next(numbers), prompt, problem, text, seed, position_noise)
        for prompt, problem, text, seed in zip(texts, names, begun, drawn, strict=True)
    ]


class Appending:
    """Appends the new tokens of a step to its sessions: to all of them, or to none.

    It copies them later: when a session is asked for its tokens, in the pause after the step, or in the next step.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Session], list[int], list[int], bytes] | None = None  # the step to copy

    def append(self, sessions: list[Session], lengths: list[int], flat: bytes) -> list[int]:
        """Appends the tokens in `flat`, one session after the other. Returns the lengths before."""
        self.copy()
        before = [session.length for session in sessions]
        self._last = sessions, before, lengths, flat
        for session, length in zip(sessions, lengths, strict=True):
            session.length += length
        return before

    def copy(self) -> None:
        """Copies the tokens of the last step to its sessions. After an interrupt, it may be called again."""
        if self._last is None:
            return
        sessions, before, lengths, flat = self._last
        start = 0
        for session, old, length in zip(sessions, before, lengths, strict=True):
            end = start + 4 * length
            session._generated[4 * old :] = flat[start:end]
            start = end
        self._last = None

    def complete(self) -> None:
        """Completes what an interrupt ended. Does nothing otherwise; may be called again."""
        if self._last is not None:
            for session, old, length in zip(*self._last[:3], strict=True):
                session.length = old + length
            self.copy()


def find(open_sessions: Mapping[int, Session], numbers: Sequence[Any]) -> list[Session]:
    """Returns the sessions with these numbers. Raises ValueError or UnknownSession, naming the first wrong number."""
    try:
        chosen = [open_sessions[number] for number in numbers]
    except (KeyError, TypeError):  # TypeError: it has no hash
        raise _not_open(open_sessions, numbers) from None
    if len(set(chosen)) < len(chosen):
        twice = next(s.number for s, count in Counter(chosen).items() if count > 1)
        raise ValueError(f"sessions: a session appears twice, {twice}")
    return chosen


def _not_open(open_sessions: Mapping[int, Session], numbers: Sequence[Any]) -> ValueError | UnknownSession:
    """Returns the error for the first of these numbers that is not an open session."""
    for i, number in enumerate(numbers):
        if not isinstance(number, int | np.integer):
            return ValueError(f"sessions[{i}]: must be a session id, an int, is {arguments.shown(number)}")
        if number not in open_sessions:
            return UnknownSession(f"sessions[{i}]: {number} is not an open session of this client")
    raise AssertionError("all are open")
