"""The forms of a stored response: message, row in SQLite, bytes in Redis, arguments of the engine.

`commands.lines` has the form in the lines of a snapshot, which is that of recorded rollouts.
"""

import struct
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import structlog
import xxhash

from histospec.protocol.arrays import INT32
from histospec.server.errors import Damaged
from histospec.server.logs.lines import Throttle
from histospec.server.stores.interface import Record
from histospec.v1 import draft_pb2 as pb

log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)


# Messages


def to_message(record: Record) -> pb.Response:
    """Returns a stored response as a message."""
    return pb.Response(**record._asdict())


def from_message(message: pb.Response) -> Record:
    """Returns the response of a message, whose fields the caller has checked."""
    return Record(
        message.tokens,
        message.epoch,
        message.reward if message.HasField("reward") else None,
        message.logprobs,
        message.generated,
        message.seed if message.HasField("seed") else None,
        message.alternatives,
    )


# The engine


def for_engine(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the arguments of `Engine.ingest` that say what the responses are."""
    return {
        "responses": [np.frombuffer(record.tokens, INT32) for record in records],
        "epochs": [record.epoch for record in records],
        "generated": [np.frombuffer(record.generated, np.uint8) if record.generated else None for record in records],
        "seeds": [record.seed for record in records],
        "alternatives": [record.alternatives for record in records],
    }


# Rows of SQLite

COLUMNS = ", ".join(("prompt", "checksum", *Record._fields))
"""The columns of a response in SQLite, beside its id."""
_NUMBERS = struct.Struct("<qqdqBIIII")
_HASHED = (1 << 32) - 1  # the bits of an XXH3 hash that are stored


def to_row(record: Record, prompt: int) -> tuple[Any, ...]:
    """Returns the values of COLUMNS. `prompt` is the id of the prompt's row."""
    return prompt, _checksum(record, prompt), *record


def from_row(row: Sequence[Any]) -> Record:
    """Returns the response of the values of COLUMNS. Raises Damaged."""
    prompt, stored, *fields = row
    record = Record(*fields)
    try:
        intact = _checksum(record, prompt) == stored
    except (TypeError, struct.error):  # damage may also change the type of a value
        intact = False
    if not intact:
        raise Damaged("store: a response does not match its checksum")
    return record


def _checksum(record: Record, prompt: int) -> int:
    """Returns 32 bits that change if a record or the number of its prompt changes."""
    arrays = record.tokens, record.logprobs, record.generated, record.alternatives
    given = (record.reward is not None) + 2 * (record.seed is not None)
    reward = (record.reward or 0.0) + 0.0  # SQLite keeps no negative zero
    numbers = _NUMBERS.pack(prompt, record.epoch, reward, record.seed or 0, given, *map(len, arrays))
    return _hash(numbers, *arrays)


def _hash(*parts: bytes) -> int:
    """Returns the hash of the joined parts."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() & _HASHED


# Bytes: little-endian: version, flags, width of a token, epoch, reward, number of tokens; then the tokens in 2, 3 or 4
# bytes each, as the largest one needs; then, if the flags say so, float32 log-probabilities, one bit per token for what
# the policy generated, and the int64 seed; then the alternatives; then 32 bits of the XXH3 hash of everything before.
# With a vocabulary of 150,000, a token takes 3 bytes.

VERSION = 1
"""The version of the bytes. A change of them takes the next number; `unpack` would read both."""
_REWARD, _LOGPROBS, _GENERATED, _SEED = 1, 2, 4, 8
_HEAD = struct.Struct("<BBBqdI")
_INT64 = struct.Struct("<q")
_UINT32 = struct.Struct("<I")


def pack(record: Record) -> bytes:
    """Encodes a record for a store that holds only bytes."""
    tokens = np.frombuffer(record.tokens, INT32)
    largest = int(tokens.max()) if tokens.size else 0
    width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
    rewarded, seeded = record.reward is not None, record.seed is not None
    flags = _REWARD * rewarded | _LOGPROBS * bool(record.logprobs) | _GENERATED * bool(record.generated)
    packed = b"".join(
        (
            _HEAD.pack(VERSION, flags | _SEED * seeded, width, record.epoch, record.reward or 0.0, tokens.size),
            tokens.view(np.uint8).reshape(-1, 4)[:, :width].tobytes(),
            record.logprobs,
            np.packbits(np.frombuffer(record.generated, np.uint8)).tobytes(),
            b"" if record.seed is None else _INT64.pack(record.seed),
            record.alternatives,
        )
    )
    return packed + _UINT32.pack(_hash(packed))


def unpack(data: bytes) -> Record:
    """Decodes a record. Raises Damaged if the bytes are not a record of this version."""
    if len(data) < _HEAD.size + _UINT32.size:
        raise Damaged(f"store: a response of {len(data)} bytes is cut short")
    if data[0] != VERSION:
        raise Damaged(
            f"store: a response has version {data[0]}, this server needs {VERSION}; take a snapshot with the version "
            "of HistoSpec that wrote it, and restore the snapshot with this one"
        )
    packed = data[: -_UINT32.size]
    if _UINT32.pack(_hash(packed)) != data[-_UINT32.size :]:
        raise Damaged(f"store: a response of {len(data)} bytes does not match its checksum")
    _, flags, width, epoch, reward, size = _HEAD.unpack_from(packed)
    rest = BytesIO(packed[_HEAD.size :])
    tokens = np.zeros((size, 4), np.uint8)
    tokens[:, :width] = np.frombuffer(rest.read(width * size), np.uint8).reshape(size, width)
    logprobs = rest.read(4 * size) if flags & _LOGPROBS else b""
    bits = rest.read(-(-size // 8)) if flags & _GENERATED else b""
    generated = np.unpackbits(np.frombuffer(bits, np.uint8))[:size].tobytes()
    seed = _INT64.unpack(rest.read(_INT64.size))[0] if flags & _SEED else None
    return Record(
        tokens.tobytes(), epoch, reward if flags & _REWARD else None, logprobs, generated, seed, rest.read()
    )  # fmt: skip


# Comparison


def mask(generated: bytes) -> bytes:
    """Returns the mask of a response; empty if all tokens were generated."""
    return generated if 0 in generated else b""


def lacking(records: Iterable[Record], held: Sequence[Record]) -> list[Record]:
    """Returns the records that are not held. A held record matches one record: a response can occur twice."""
    return without(records, Counter(map(_compared, held)), _compared)


def without(records: Iterable[Record], held: "Counter[K]", key: Callable[[Record], K]) -> list[Record]:
    """Returns the records whose keys `held` does not count; removes the others from `held`."""
    found = []
    for record in records:
        same = key(record)
        if held[same]:
            held[same] -= 1
        else:
            found.append(record)
    return found


def _compared(record: Record) -> Record:
    """Returns the parts of a record that are equal in every copy: a reward may have travelled as float32."""
    with np.errstate(over="ignore"):
        reward = None if record.reward is None else float(np.float32(record.reward))
    return record._replace(generated=mask(record.generated), reward=reward)


# Damage

_REMEMBERED = 100_000  # damaged responses, so that rereading one does not count it again


class DamageCount:
    """Counts stored responses that differ from what was written. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()
        self._throttle = Throttle(10, 60.0)
        self.responses = 0

    def found(self, which: Hashable, reason: str) -> None:
        """Counts a response that is left out; `which` identifies it."""
        with self._lock:
            if which in self._seen:
                return
            if len(self._seen) < _REMEMBERED:
                self._seen.add(which)
            self.responses += 1
            left_out = self._throttle.admits("damaged")
        if left_out is not None:
            log.error("a stored response is damaged and left out", reason=reason, **left_out)

    def lost(self, responses: int) -> None:
        """Counts responses that could not even be read."""
        with self._lock:
            self.responses += responses
