"""Recorded rollouts: one problem a line, JSON or gzipped JSON (docs/replay.md describes the format).

A file is read as a stream. The first record that is not as described stops it with a `RecordingError` naming the
line, the field and what was expected there.
"""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from histospec.protocol.limits import MAX_EPOCH
from histospec.server.errors import ConfigError
from histospec.server.failures import reason

MAX_TOKEN = (1 << 31) - 1
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
STDIN = "-"
PIECE = 1 << 20
MAX_LINE = 1 << 30

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


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """A file or pipe of this name, or the standard input for `-`; inside, what is wrong with it is a ConfigError.

    Raises:
        ConfigError: it cannot be opened, or a RecordingError was raised inside.

    """
    shown = "the standard input" if name == STDIN else name
    try:
        file = open(0 if name == STDIN else name, "rb", closefd=name != STDIN)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{shown}: {reason(error)}; give a readable file, or - for the standard input") from None
    with file:
        try:
            yield file
        except RecordingError as error:
            raise ConfigError(f"{shown}: {error}") from None


def is_regular(file: BinaryIO) -> bool:
    """Whether it can be read as often as wanted; a pipe can be read once."""
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number from 1."""
    number = 0
    try:
        head = file.read(len(GZIP_MAGIC))
        stream = io.BufferedReader(cast(io.RawIOBase, _Rejoined(head, file)))
        source = cast(BinaryIO, gzip.GzipFile(fileobj=stream) if head == GZIP_MAGIC else stream)
        while line := _line(source, number + 1):
            number += 1
            if not line.isspace():
                yield number, line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"after line {number}: the gzip archive is damaged ({error})") from None
    except OSError as error:
        raise RecordingError(f"after line {number}: cannot be read ({reason(error)})") from None


def _line(source: BinaryIO, number: int) -> bytes:
    """The next line. What is no text is noticed early: a device may have no line that ends."""
    line = source.readline(PIECE)
    if line.endswith(b"\n") or len(line) < PIECE:
        return line
    pieces, size = [line], len(line)
    while True:
        if b"\0" in line or pieces[0].removeprefix(BOM).lstrip()[:1] not in (b"{", b""):
            raise RecordingError(f"line {number}: not JSON: expected an object that begins with {{")
        if size > MAX_LINE:
            raise RecordingError(f"line {number}: is longer than {MAX_LINE >> 20} MiB; split the file into lines")
        line = source.readline(PIECE)
        pieces.append(line)
        size += len(line)
        if line.endswith(b"\n") or len(line) < PIECE:
            return b"".join(pieces)


class _Rejoined(io.RawIOBase):
    """A stream of which the beginning was read, as if it had not been."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head or self._rest.read1(len(buffer))  # type: ignore[attr-defined]
        taken, self._head = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


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
        return f"{field}: {_shown(value)} is {'below' if kind == 'greater_than_equal' else 'above'} the limit {limit}"
    what = error["msg"].removeprefix("Input ")
    return f"{field or 'record'}: {what}, is {_shown(value)}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
