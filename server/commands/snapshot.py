"""`histospec snapshot FILE` and `histospec restore FILE`: what a store holds as a file, and back.

The file is one of recorded rollouts (docs/replay.md), so that `histospec replay` reads it, too. A problem is a line,
read and written one at a time, so that memory does not depend on how much there is.
"""

import base64
import gzip
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Annotated, Any, BinaryIO, cast

import numpy as np
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from histospec.protocol.arrays import FLOAT32, INT32
from histospec.protocol.limits import MAX_NAMESPACE, MAX_PROBLEM
from histospec.replay.recordings import Line, LineResponse, RecordingError, is_regular, opened, read_as
from histospec.server.arguments import ArgumentParser
from histospec.server.errors import ConfigError, HistoSpecError, StoreError
from histospec.server.open_store import open_reader, open_store
from histospec.server.settings import options
from histospec.server.settings.config import StoreConfig
from histospec.server.stores.interface import Problem, Reader, Record, ResponseBatch, Store, by_epoch, total_size
from histospec.server.targets import FORCE, is_stdout, written

# What a restore has on its way to the store at once.
BATCHES = 64
BYTES = 32 << 20


class SnapshotError(HistoSpecError):
    """A snapshot could not be written, or not all of it restored."""


def snapshot(argv: Sequence[str]) -> int:
    """Runs `histospec snapshot` with these arguments. Raises HistoSpecError."""
    parser = _parser("snapshot", "Write what the store holds to a file, also while servers use it.")
    parser.add_argument("file", metavar="FILE", help="to be written, .jsonl or .jsonl.gz; - for the standard output")
    parser.add_argument("--force", action="store_true", help=FORCE)
    flags = vars(parser.parse_args(list(argv)))
    file, pattern, force = flags.pop("file"), flags.pop("namespace", "*"), flags.pop("force", False)
    reader = open_reader(options.settle(StoreConfig, flags))
    try:
        with written(file, force=force, private=True) as out:
            counts = _pack(reader, pattern, out) if file.endswith(".gz") else _write(reader, pattern, out)
    finally:
        reader.close()
    (sys.stderr if is_stdout(file) else sys.stdout).write(f"{file}: {_summary(counts)}\n")
    if reader.damaged_responses:
        raise SnapshotError(
            f"{reader.damaged_responses} responses or more of the store are damaged and left out; {file} has all "
            "others (docs/operations.md#histospecstoredamaged)"
        )
    return 0


def restore(argv: Sequence[str]) -> int:
    """Runs `histospec restore` with these arguments. Raises HistoSpecError."""
    parser = _parser("restore", "Bring what a snapshot holds into the store.")
    parser.add_argument("file", metavar="FILE", help="as `histospec snapshot` wrote it; - for standard input")
    parser.add_argument("--merge", action="store_true", help="add to namespaces that the store has what they lack")
    flags = vars(parser.parse_args(list(argv)))
    file, pattern, merge = flags.pop("file"), flags.pop("namespace", "*"), flags.pop("merge", False)
    config = options.settle(StoreConfig, flags)
    with opened(file) as source:
        # All of a file is looked at before anything is done. A pipe can be read only once.
        named = {line.namespace for line in _lines(source, pattern)} if is_regular(source) else set()
        store = open_store(config, "")
        try:
            held = set(store.newest_epochs())
            _refuse(held & named, merge)
            if is_regular(source):
                source.seek(0)
            counts = _restore(store, _lines(source, pattern), held, merge)
        except StoreError as error:
            raise SnapshotError(f"{error}; earlier ones are: restore again with --merge to add the rest") from None
        finally:
            store.close()
    sys.stdout.write(f"{file}: {_summary(counts)}\n")
    return 0


def _refuse(held: set[str], merge: bool) -> None:
    if held and not merge:
        raise ConfigError(
            f"the store already holds the namespace {min(held)!r}: drop it, leave it out with --namespace, or "
            "give --merge to add what it lacks"
        )


def _parser(word: str, description: str) -> ArgumentParser:
    parser = options.parser(StoreConfig, f"histospec {word}", description)
    parser.add_argument("--namespace", metavar="PATTERN", help="only namespaces of this shell pattern, such as 'run-*'")
    return parser


def _summary(counts: "Counter[str]") -> str:
    return ", ".join(f"{counts[what]} {what}" for what in ("problems", "responses", "tokens"))


# Writing


def _pack(reader: Reader, pattern: str, out: BinaryIO) -> "Counter[str]":
    with gzip.GzipFile("", "wb", 6, out, mtime=0) as packed:
        return _write(reader, pattern, cast(BinaryIO, packed))


def _write(reader: Reader, pattern: str, out: BinaryIO) -> "Counter[str]":
    counts: Counter[str] = Counter()
    for namespace in sorted(reader.newest_epochs()):
        if not fnmatchcase(namespace, pattern):
            continue
        learned = reader.estimator(namespace)
        for problem, records in reader.problems(namespace):
            line = _line(problem, records)
            if learned:
                line["estimator"] = base64.b64encode(learned).decode()
                learned = None
            out.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            _count(counts, records)
    return counts


def _count(counts: "Counter[str]", records: Sequence[Record]) -> None:
    tokens = sum(len(record.tokens) for record in records) // INT32.itemsize
    counts.update(problems=1, responses=len(records), tokens=tokens)


def _line(problem: Problem, records: Sequence[Record]) -> dict[str, Any]:
    line: dict[str, Any] = {"namespace": problem.namespace}
    if problem.name:
        line["id"] = problem.name
    line["prompt"] = np.frombuffer(problem.prompt, INT32).tolist()
    line["responses"] = [_response(record) for record in records]
    return line


def _response(record: Record) -> dict[str, Any]:
    tokens = np.frombuffer(record.tokens, INT32).tolist()
    response: dict[str, Any] = {"epoch": record.epoch}
    if _mask(record.generated):
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
        # As float64, whose shortest decimals lead back to the same float32.
        response["logprobs"] = np.frombuffer(record.logprobs, FLOAT32).astype(float).tolist()
    return response


def _mask(generated: bytes) -> bytes:
    """The mask, empty where it says that everything was generated."""
    return generated if 0 in generated else b""


# Reading


class _StoredResponse(LineResponse):
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    logprobs: list[float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None

    @model_validator(mode="after")
    def _one_a_token(self) -> "_StoredResponse":
        tokens = sum(len(part) for part, _ in self.parts())
        if self.logprobs and len(self.logprobs) != tokens:
            raise PydanticCustomError("text", f"has {len(self.logprobs)} logprobs for {tokens} tokens")
        return self

    def record(self) -> Record:
        tokens = [token for part, _ in self.parts() for token in part]
        generated = b"".join(bytes([written]) * len(part) for part, written in self.parts())
        logprobs = np.array(self.logprobs or [], FLOAT32).tobytes()
        return Record(np.array(tokens, INT32).tobytes(), self.epoch, self.reward, logprobs, _mask(generated), self.seed)


def _base64(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except ValueError:
        raise PydanticCustomError("text", "should be base64") from None


class _StoredLine(Line):
    namespace: Annotated[str, Field(min_length=1, max_length=MAX_NAMESPACE)]
    id: Annotated[str, Field(max_length=MAX_PROBLEM)] | None = None
    responses: Annotated[Sequence[_StoredResponse], Field(min_length=1)]
    estimator: Annotated[bytes, BeforeValidator(_base64)] | None = None


def _lines(source: BinaryIO, pattern: str) -> Iterator[_StoredLine]:
    """The lines of the file whose namespace matches."""
    for _, line in read_as(_StoredLine, source):
        if fnmatchcase(line.namespace, pattern):
            yield line


def _restore(store: Store, lines: Iterator[_StoredLine], held: set[str], merge: bool) -> "Counter[str]":
    """Adds what the lines hold, to the namespaces in `held` only what those lack."""
    counts: Counter[str] = Counter()
    flight = _Flight(store)
    try:
        for line in lines:
            _refuse(held & {line.namespace}, merge)
            _restore_line(store, flight, line, line.namespace in held, counts)
    except (ConfigError, RecordingError) as error:  # of what could be read only once
        flight.land()
        if not counts:
            raise
        raise type(error)(f"{error} (restored before it: {_summary(counts)}; go on with --merge)") from None
    flight.land()
    return counts


def _restore_line(store: Store, flight: "_Flight", line: _StoredLine, held: bool, counts: "Counter[str]") -> None:
    problem = Problem(line.namespace, np.array(line.prompt, INT32).tobytes(), line.id or "")
    records = sorted((response.record() for response in line.responses), key=lambda record: record.epoch)
    if held:
        records = _lacking(records, store.history(problem))
    for batch in by_epoch(problem, records):
        flight.send(batch)
    if line.estimator and store.estimator(line.namespace) is None:
        flight.land()
        store.save_estimator(line.namespace, line.estimator).result()
    _count(counts, records)


def _lacking(records: Sequence[Record], held: Sequence[Record]) -> list[Record]:
    """Those that are not held. A response that was sampled twice may be held once."""
    there = Counter(record._replace(generated=_mask(record.generated)) for record in held)
    lacking = []
    for record in records:
        if there[record]:
            there[record] -= 1
        else:
            lacking.append(record)
    return lacking


class _Flight:
    """Batches on their way to the store: many, so that they share its round trips, but no more than fit in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def send(self, batch: ResponseBatch) -> None:
        """Waits for earlier ones where there are many."""
        size = total_size(batch.records)
        self.land(BATCHES - 1, BYTES - size)
        self._waiting.append((self._store.append(batch), size))

    def land(self, batches: int = 0, size: int = 0) -> None:
        """Waits until no more than so many, and so many bytes, are left. Raises StoreError."""
        while self._waiting and (len(self._waiting) > batches or sum(s for _, s in self._waiting) > size):
            self._waiting.popleft()[0].result()
