"""The contents of a recording: problems, their responses, and the turns of a response."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def common(a: Tokens, b: Tokens) -> int:
    """Returns the length of the longest common prefix."""
    length = min(len(a), len(b))
    misses = np.flatnonzero(a[:length] != b[:length])
    return int(misses[0]) if len(misses) else length


class RecordingError(ValueError):
    """The file is not a valid recording; the message says where and why."""


@dataclass(frozen=True)
class Turn:
    """A run of tokens from one side.

    Attributes:
        tokens: int32[n], n > 0.
        generated: True if the model wrote them, False if the environment did (tools, users).

    """

    tokens: Tokens
    generated: bool


@dataclass(frozen=True)
class RecordedResponse:
    """One response to a problem: at least one turn, sampled by the policy of `epoch` together with its `group`."""

    epoch: int
    turns: tuple[Turn, ...]
    group: object = None

    def flat(self) -> Tokens:
        """Returns all tokens of all turns, int32[n]."""
        return self.turns[0].tokens if len(self.turns) == 1 else np.concatenate([turn.tokens for turn in self.turns])

    def cut(self, length: int) -> tuple[Turn, ...]:
        """Returns the turns that hold the first `length` tokens."""
        kept, room = [], length
        for turn in self.turns:
            if room <= 0:
                break
            kept.append(Turn(turn.tokens[:room], turn.generated))
            room -= len(turn.tokens)
        return tuple(kept)


@dataclass(frozen=True)
class Problem:
    """A prompt, int32[n], with all its recorded responses, in the order of the file."""

    prompt: Tokens
    responses: tuple[RecordedResponse, ...]

    def epochs(self) -> list[int]:
        """Returns the epochs of the problem's visits, oldest first."""
        return sorted({response.epoch for response in self.responses})


@dataclass(slots=True, eq=False)
class Row:
    """One response as a reader found it.

    Attributes:
        place: its place for messages, such as `line 7`.
        prompt: int32[n], n > 0.
        turns: empty if the model wrote nothing.
        epoch: the policy's version; None if the record does not name it.
        problem: an explicit id; None: the prompt identifies the problem.
        namespace: the training run; None if the record does not name it.
        group: identifies responses sampled together; None if the record does not name it.

    """

    place: str
    prompt: Tokens
    turns: tuple[Turn, ...]
    epoch: int | None
    problem: str | int | None = None
    namespace: str | int | None = None
    group: object = None
