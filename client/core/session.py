"""The client's copy of a session: enough to open it again on a server that has forgotten it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histospec.client import arguments
from histospec.client.errors import UnknownSession


class Session:
    """One running generation. Keeps its tokens in the format of the wire: little-endian int32 bytes."""

    __slots__ = (
        "continued", "generated", "length", "number", "opened", "problem", "prompt", "refused", "seed", "unreported",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        prompt: bytes,
        problem: str,
        generated: bytes = b"",
        seed: int | None = None,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.problem = problem
        self.generated = bytearray(generated)
        self.length = len(generated) // 4  # in tokens; stored, because every step reads it for each session
        self.seed = seed
        self.continued = 0
        """How many of the generated tokens, the first ones, an aborted response had before; the caller did not."""
        self.opened = False
        self.refused = False
        self.unreported: NDArray[np.int32] | None = None
        """The sum of the rows of `StepInput.report` of steps that were not sent."""

    @property
    def own(self) -> int:
        """How many tokens it has generated, without those of the aborted response that it continues."""
        return self.length - self.continued

    def resume(self, prompt: int) -> None:
        """Continues an aborted response, whose prompt are the first `prompt` tokens of this session's."""
        taken = self.prompt[4 * prompt :]
        self.prompt = self.prompt[: 4 * prompt]
        self.generated[:0] = taken
        self.length += len(taken) // 4
        self.continued += len(taken) // 4
        self.seed = None  # it draws the rest, not the whole response

    @property
    def bytes(self) -> int:
        """The approximate bytes of its open on the wire."""
        return len(self.prompt) + len(self.generated)


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
