"""The lines of a snapshot: one problem per line, in the format of recorded rollouts (docs/replay.md).

The last line ends with the field `seal`: the number of lines, and the XXH3 hash of all bytes before the seal. Each line
says that a seal follows, in the field `sealed`. So a file that was cut or changed is noticed. Readers of recorded
rollouts ignore both fields. A file without them, which another program wrote, can be restored, too.
"""

import base64
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from histospec.protocol.alternatives import fault
from histospec.protocol.arrays import FLOAT32, INT32
from histospec.protocol.limits import MAX_NAMESPACE, MAX_PROBLEM
from histospec.replay.recordings import Line, LineResponse, RecordingError, read_as
from histospec.server.stores.interface import Problem, Record
from histospec.server.stores.records import mask

GZIP = 16 + zlib.MAX_WBITS
LEVEL = 6
FLUSHED = 16 << 10  # bytes to compress before they are passed on
INFINITE = 1e39  # stands for infinity, which JSON lacks: beyond float32, so that a reader of float32 gets infinity


class Stored(NamedTuple):
    """A problem and its responses, oldest first. The first problem of a namespace also has its estimator's state."""

    problem: Problem
    records: list[Record]
    estimator: bytes | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of the responses."""
        return sum(len(record.tokens) for record in self.records) // INT32.itemsize


def summary(counts: "Counter[str]") -> str:
    """Returns numbers of problems, responses and tokens in words, and how many responses are missing, and why."""
    missing = {"too_old": "responses too old to keep", "left_out": "older responses left out (--history-responses)"}
    some = [f"{counts[what]} {why}" for what, why in missing.items() if counts[what]]
    return ", ".join([*(f"{counts[what]} {what}" for what in ("problems", "responses", "tokens")), *some])


# Writing

SEAL = b',"seal":'


class Seal(NamedTuple):
    """What the last line says of the file."""

    lines: int
    xxh3: str
    """XXH3-64 in hex."""


class _Running:
    """The seal of the lines so far."""

    def __init__(self) -> None:
        self._lines = 0
        self._hash = xxhash.xxh3_64()

    def add(self, line: bytes) -> bytes:
        """Adds a line, and returns it."""
        self._lines += 1
        self._hash.update(line)
        return line

    @property
    def value(self) -> Seal:
        return Seal(self._lines, self._hash.hexdigest())


def encoded(problems: Iterable[Stored]) -> Iterator[bytes]:
    """Yields one line per problem, the last one with the seal."""
    seal = _Running()
    line = b""
    for stored in problems:
        if line:
            yield seal.add(line + b"\n")
        line = _json({"sealed": True, **_line(stored)})
    if line:
        yield seal.add(line[:-1]) + SEAL + _json(seal.value._asdict()) + b"}\n"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def packed(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Compresses lines with gzip. Yields pieces of the archive."""
    pack = zlib.compressobj(LEVEL, wbits=GZIP)
    waiting: list[bytes] = []
    size = 0
    for line in lines:
        waiting.append(pack.compress(line))
        size += len(waiting[-1])
        if size >= FLUSHED:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join([*waiting, pack.flush()])


def _line(stored: Stored) -> dict[str, Any]:
    problem = stored.problem
    line: dict[str, Any] = {"namespace": problem.namespace}
    if problem.name:
        line["id"] = problem.name
    line["prompt"] = np.frombuffer(problem.prompt, INT32).tolist()
    line["responses"] = [_response(record) for record in stored.records]
    if stored.estimator:
        line["estimator"] = base64.b64encode(stored.estimator).decode()
    return line


def _response(record: Record) -> dict[str, Any]:
    tokens = np.frombuffer(record.tokens, INT32).tolist()
    response: dict[str, Any] = {"epoch": record.epoch}
    if mask(record.generated):
        parts = groupby(zip(record.generated, tokens, strict=True), key=lambda pair: pair[0])
        response["turns"] = [
            {"role": "assistant" if generated else "environment", "tokens": [token for _, token in part]}
            for generated, part in parts
        ]
    else:
        response["tokens"] = tokens
    if record.reward is not None:
        response["reward"] = record.reward
    if record.seed is not None:
        response["seed"] = record.seed
    if record.logprobs:
        # As float64: its shortest decimals convert back to the same float32.
        logprobs = np.frombuffer(record.logprobs, FLOAT32).astype(float)
        response["logprobs"] = logprobs.clip(-INFINITE, INFINITE).tolist()
    if record.alternatives:
        response["alternatives"] = base64.b64encode(record.alternatives).decode()
    return response


# Reading


def _base64(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except ValueError:
        raise PydanticCustomError("text", "should be base64") from None


class _StoredResponse(LineResponse):
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    logprobs: list[float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    alternatives: Annotated[bytes, BeforeValidator(_base64)] = b""

    @model_validator(mode="after")
    def _one_a_token(self) -> "_StoredResponse":
        tokens = sum(len(part) for part, _ in self.parts())
        if self.logprobs and len(self.logprobs) != tokens:
            raise PydanticCustomError("text", f"has {len(self.logprobs)} logprobs for {tokens} tokens")
        if wrong := fault(self.alternatives, tokens):
            raise PydanticCustomError("text", f"has alternatives that do not fit: {wrong}")
        return self

    def record(self) -> Record:
        tokens = [token for part, _ in self.parts() for token in part]
        generated = b"".join(bytes([written]) * len(part) for part, written in self.parts())
        with np.errstate(over="ignore"):  # INFINITE
            logprobs = np.array(self.logprobs or [], FLOAT32).tobytes()
        text = np.array(tokens, INT32).tobytes()
        return Record(text, self.epoch, self.reward, logprobs, mask(generated), self.seed, self.alternatives)


class _StoredLine(Line):
    namespace: Annotated[str, Field(min_length=1, max_length=MAX_NAMESPACE)]
    id: Annotated[str, Field(max_length=MAX_PROBLEM)] | None = None
    responses: Annotated[Sequence[_StoredResponse], Field(min_length=1)]
    estimator: Annotated[bytes, BeforeValidator(_base64)] | None = None
    sealed: bool = False
    seal: Seal | None = None

    def stored(self) -> Stored:
        problem = Problem(self.namespace, np.array(self.prompt, INT32).tobytes(), self.id or "")
        records = sorted((response.record() for response in self.responses), key=lambda record: record.epoch)
        return Stored(problem, records, self.estimator)


def namespaces(source: BinaryIO, pattern: str) -> set[str]:
    """Returns the matching namespaces of a whole file. Raises RecordingError if a line is invalid, or the seal."""
    return {line.namespace for line in _lines(source) if fnmatchcase(line.namespace, pattern)}


def decoded(source: BinaryIO, pattern: str) -> Iterator[Stored]:
    """Yields the problems of a file in namespaces that match. Raises RecordingError."""
    for line in _lines(source):
        if fnmatchcase(line.namespace, pattern):
            yield line.stored()


def _lines(source: BinaryIO) -> Iterator[_StoredLine]:
    """Yields the lines of one or several snapshots, and checks their seals."""
    running: _Running | None = None
    place = ""
    for record, line in read_as(_StoredLine, source):
        place = record.place
        content = record.content
        if isinstance(content, bytes) and (line.sealed or line.seal or running):
            running = running or _Running()
            if line.seal is None:
                running.add(content + b"\n")
            else:
                running.add(content[: content.rfind(SEAL)])
                if running.value != line.seal:
                    raise record.wrong(
                        f"the file does not match its seal: of {line.seal.lines} lines, some are missing or were "
                        "changed; copy the file again, or restore another one"
                    )
                running = None
        yield line
    if running:
        raise RecordingError(f"after {place}: the last lines are missing; copy the file again, or restore another one")
