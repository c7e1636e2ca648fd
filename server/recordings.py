"""Recorded rollouts: one problem a line, JSON or gzipped JSON (docs/replay.md describes the format).

A file is read as a stream. The first record that is not as described stops it with a `RecordingError` naming the
line, the field and what was expected there.
"""

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from histospec.server.store import MAX_EPOCH

MAX_TOKEN = (1 << 31) - 1
GZIP_MAGIC = b"\x1f\x8b"

L = TypeVar("L", bound="Line")
Tokens = npt.NDArray[np.int32]


class RecordingError(ValueError):
    """The file is not a recording; the text says where and why."""


@dataclass(frozen=True)
class Turn:
    """A run of tokens that came from one side.

    Attributes:
        tokens: int32[n], n > 0.
        generated: True where the model wrote them, False where the environment did (tools, users).

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
        """All tokens of all turns, int32[n]."""
        return self.turns[0].tokens if len(self.turns) == 1 else np.concatenate([turn.tokens for turn in self.turns])

    def cut(self, length: int) -> tuple[Turn, ...]:
        """The turns that hold the first `length` tokens."""
        kept, room = [], length
        for turn in self.turns:
            if room <= 0:
                break
            kept.append(Turn(turn.tokens[:room], turn.generated))
            room -= len(turn.tokens)
        return tuple(kept)


@dataclass(frozen=True)
class Problem:
    """A prompt, int32[n], with every response that was recorded for it, in the order of the file."""

    prompt: Tokens
    responses: tuple[RecordedResponse, ...]

    def epochs(self) -> list[int]:
        """When the problem was visited, oldest first."""
        return sorted({response.epoch for response in self.responses})


def read(file: BinaryIO) -> Iterator[Problem]:
    """The problems of an open binary file, plain or gzipped.

    Raises:
        RecordingError: a line is not a record, an id comes twice, the archive is damaged, or there is no record at all.

    """
    lines: dict[tuple[str | None, str | int], int] = {}
    for number, record in read_as(Line, file):
        if record.id is not None and (first := lines.setdefault((record.namespace, record.id), number)) != number:
            raise RecordingError(
                f"line {number}: id: {record.id!r} is also on line {first}; one line holds all responses of a problem"
            )
        yield Problem(np.array(record.prompt, np.int32), tuple(response.recorded() for response in record.responses))


def read_as(kind: type[L], file: BinaryIO) -> Iterator[tuple[int, L]]:
    """The lines of an open binary file, plain or gzipped, as a kind of `Line`, each with its number from 1.

    Raises:
        RecordingError: as `read`, but that an id may come again.

    """
    empty = True
    for number, line in _lines(file):
        try:
            record = kind.model_validate_json(line)
        except ValidationError as error:
            raise RecordingError(f"line {number}: {_explain(error.errors()[0])}") from None
        empty = False
        yield number, record
    if empty:
        raise RecordingError("holds no records")


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number from 1."""
    buffered = io.BufferedReader(file)  # type: ignore[type-var]  # any readable object will do
    zipped = buffered.peek(2).startswith(GZIP_MAGIC)
    number = 0
    try:
        for number, line in enumerate(gzip.GzipFile(fileobj=buffered) if zipped else buffered, 1):
            if line.strip():
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"after line {number}: the gzip archive is damaged ({error})") from None


# What a line must be. Fields that are not named here are ignored.

Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Turn(_Strict):
    role: Literal["assistant", "environment"]
    tokens: list[Token]


class LineResponse(_Strict):
    """One response in a line."""

    epoch: Annotated[int, Field(ge=0, le=MAX_EPOCH)]
    group: Any = None
    tokens: list[Token] | None = None
    turns: list[_Turn] | None = None

    @model_validator(mode="after")
    def _has_text(self) -> "LineResponse":
        if (self.tokens is None) == (self.turns is None):
            raise PydanticCustomError("text", "needs exactly one of tokens and turns")
        if not any(tokens for tokens, _ in self.parts()):
            raise PydanticCustomError("text", "must not be empty: it has no token")
        return self

    def parts(self) -> list[tuple[list[int], bool]]:
        """Tokens, and whether the model wrote them, in order; some may be empty."""
        if self.turns is None:
            return [(self.tokens or [], True)]
        return [(turn.tokens, turn.role == "assistant") for turn in self.turns]

    def recorded(self) -> RecordedResponse:
        """As arrays."""
        turns = (Turn(np.array(tokens, np.int32), generated) for tokens, generated in self.parts() if tokens)
        return RecordedResponse(self.epoch, tuple(turns), self.group)


class Line(_Strict):
    """One problem. A subclass may ask for more."""

    namespace: str | None = None
    id: str | int | None = None
    prompt: Annotated[list[Token], Field(min_length=1)]
    responses: Annotated[Sequence[LineResponse], Field(min_length=1)]


def _explain(error: ErrorDetails) -> str:
    """`responses[2].tokens[17]: what was expected, what is there`."""
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    kind, value = error["type"], error["input"]
    limits = error.get("ctx", {})
    if kind == "json_invalid":
        return f"not JSON: {limits['error']}".replace("line 1 column", "column")  # a record is one line
    if kind == "missing":
        return f"{field}: missing"
    if kind == "too_short":
        return f"{field}: must not be empty"
    if kind == "text":
        return f"{field}: {error['msg']}"
    if kind in ("greater_than_equal", "less_than_equal", "less_than"):
        limit = "2^63 - 1" if kind == "less_than" else next(iter(limits.values()))
        return f"{field}: {value} is {'below' if kind == 'greater_than_equal' else 'above'} the limit {limit}"
    shown = repr(value)
    what = error["msg"].removeprefix("Input ")
    return f"{field or 'record'}: {what}, is {shown if len(shown) <= 60 else shown[:57] + '...'}"
