"""Reads the documented formats (docs/replay.md).

A record is one problem with all its responses, or one response, as in users' logs and in the files of HISTOSPEC_RECORD.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from histospec.protocol.limits import MAX_EPOCH
from histospec.replay.recordings import source
from histospec.replay.recordings.check import Epoch, Name, Prompt, Record, Tokens
from histospec.replay.recordings.text import Text
from histospec.replay.recordings.values import Problem, RecordedResponse, Row, Turn

L = TypeVar("L", bound="Line")

# One problem per record. Other fields are ignored.


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class LineTurn(_Strict):
    """One turn of a response."""

    role: Literal["assistant", "environment"]
    tokens: Tokens


class LineText(_Strict):
    """The text of a response, as one run of tokens or as turns; it may be empty."""

    tokens: Tokens | None = None
    turns: list[LineTurn] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "LineText":
        if (self.tokens is None) == (self.turns is None):
            raise PydanticCustomError("text", "needs exactly one of tokens and turns")
        return self

    def parts(self) -> list[tuple[list[int], bool]]:
        """Returns tokens, and whether the model wrote them, in order; some may be empty."""
        if self.turns is None:
            return [(self.tokens or [], True)]
        return [(turn.tokens, turn.role == "assistant") for turn in self.turns]

    def arrays(self) -> tuple[Turn, ...]:
        """Returns the turns that are not empty."""
        return tuple(Turn(np.array(tokens, np.int32), generated) for tokens, generated in self.parts() if tokens)


class LineResponse(LineText):
    """One response of a line."""

    epoch: Epoch
    group: Any = None

    @model_validator(mode="after")
    def _has_text(self) -> "LineResponse":
        if not any(tokens for tokens, _ in self.parts()):
            raise PydanticCustomError("text", "must not be empty: it has no token")
        return self

    def recorded(self) -> RecordedResponse:
        """Returns the response as arrays."""
        return RecordedResponse(self.epoch, self.arrays(), self.group)


class Line(_Strict):
    """One problem. A subclass may require more."""

    namespace: str | None = None
    id: Name | None = None
    prompt: Prompt
    responses: Annotated[Sequence[LineResponse], Field(min_length=1)]


def read_as(kind: type[L], file: BinaryIO) -> Iterator[tuple[Record, L]]:
    """Yields the records of an open binary file as `kind`, a kind of `Line`.

    Raises:
        RecordingError: a record is not such a line, or the file is unreadable or empty. Ids may repeat.

    """
    for record in source.records(file, kind.model_fields):
        yield record, record.checked(kind)


def problems(records: Iterable[Record]) -> Iterator[Problem]:
    """Yields the problems of these records.

    Raises:
        RecordingError: a record is not a line of this format, or an id repeats.

    """
    for _, line in _unique(records):
        yield Problem(np.array(line.prompt, np.int32), tuple(response.recorded() for response in line.responses))


def rows(records: Iterable[Record], text: Text) -> Iterator[Row]:
    """Yields the responses of these records one at a time. Raises as `problems` does."""
    for place, line in _unique(records):
        prompt = np.array(line.prompt, np.int32)
        for response in line.responses:
            yield Row(place, prompt, response.arrays(), response.epoch, line.id, line.namespace, response.group)


def _unique(records: Iterable[Record]) -> Iterator[tuple[str, Line]]:
    places: dict[tuple[str | None, str], str] = {}
    for record in records:
        line = record.checked(Line)
        first = record.place if line.id is None else places.setdefault((line.namespace, str(line.id)), record.place)
        if first != record.place:
            raise record.wrong(f"id: {line.id!r} is also on {first}; put all responses of a problem on one line")
        yield record.place, line


# One response per record.

WRITTEN = ("tokens", "turns", "response")
"""The fields with what the model wrote; a record has exactly one of them."""


def responses(records: Iterable[Record], text: Text) -> Iterator[Row]:
    """Yields the responses of these records. Raises RecordingError."""
    counted = _Counted()
    for record in records:
        namespace = record.name("namespace")
        yield Row(
            record.place,
            text.prompt(record, "prompt"),
            _turns(record, text),
            counted.epoch(record, namespace),
            record.name("id"),
            namespace,
            record.fields().get("group"),
        )


def _turns(record: Record, text: Text) -> tuple[Turn, ...]:
    found = [field for field in WRITTEN if record.fields().get(field) is not None]
    if len(found) != 1:
        there = " and ".join(found) if found else "none of them"
        raise record.wrong(f"needs exactly one of tokens, turns and response; has {there}")
    if found == ["turns"]:
        return Record(record.place, {"turns": record.get("turns")}).checked(LineText).arrays()
    return text.response(record, found[0])


class _Counted:
    """Epochs of responses whose worker counted weight changes, computed as the server does."""

    def __init__(self) -> None:
        self._newest: dict[object, int] = {}
        self._stated: set[object] = set()  # namespaces in which a record has named an epoch
        self._bases: dict[object, int] = {}  # by namespace and worker: epoch before the worker's first change

    def epoch(self, record: Record, namespace: object) -> int | None:
        """Returns the epoch of a response; None if the record does not say it."""
        epoch, changes = record.epoch("epoch"), record.epoch("changes")
        newest = self._newest.get(namespace, 0)
        if epoch is not None:
            self._stated.add(namespace)
        elif changes is None:
            return None
        elif namespace in self._stated:
            epoch = newest
        else:
            base = self._bases.setdefault((namespace, record.name("worker")), newest - changes)
            epoch = min(max(newest, base + changes), MAX_EPOCH)
        self._newest[namespace] = max(newest, epoch)
        return epoch
