"""Encodes a response as bytes, for stores that hold only bytes.

Little-endian: version, flags, width of a token, epoch, reward, number of tokens; then the tokens in 2, 3 or 4 bytes
each, as the largest one needs; then, if the flags say so, float32 log-probabilities, one bit per token for what the
policy generated, the int64 seed, and the length of the alternatives with their bytes; then 32 bits of the XXH3 hash of
everything before. With a vocabulary of 150,000, a token takes 3 bytes.

Responses of versions 1 (without a seed) and 2 (with a seed) have no hash and can still be read. Only responses with
alternatives have version 4, so older servers read all others. They refuse versions that they do not know by their
number.
"""

import struct

import numpy as np
import xxhash

from histospec.protocol.alternatives import fault
from histospec.protocol.arrays import INT32
from histospec.server.errors import Damaged
from histospec.server.stores.interface import LAST_EPOCH, Record

PLAIN, SEEDED, CHECKED, WEIGHED = 1, 2, 3, 4  # the versions
REWARD, LOGPROBS, GENERATED, SEED, ALTERNATIVES = 1, 2, 4, 8, 16
_HEAD = struct.Struct("<BBBqdI")
_SEED = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
_HASH = struct.Struct("<I")
_HASHED = (1 << 32) - 1  # the bits of the hash that are stored
_WRAP = 1 << 64
_ABOUT = struct.Struct("<qQdQBIII")


def pack(record: Record) -> bytes:
    """Encodes a record."""
    tokens = np.frombuffer(record.tokens, INT32)
    largest = int(tokens.max()) if tokens.size else 0
    width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
    flags = REWARD * (record.reward is not None) | LOGPROBS * bool(record.logprobs) | GENERATED * bool(record.generated)
    seed = b"" if record.seed is None else _SEED.pack(record.seed)
    flags |= SEED * bool(seed)
    flags |= ALTERNATIVES * bool(record.alternatives)
    version = WEIGHED if record.alternatives else CHECKED
    head = _HEAD.pack(version, flags, width, record.epoch, record.reward or 0.0, tokens.size)
    narrow = tokens.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    mask = np.packbits(np.frombuffer(record.generated, np.uint8)).tobytes() if record.generated else b""
    others = _LENGTH.pack(len(record.alternatives)) + record.alternatives if record.alternatives else b""
    packed = head + narrow + record.logprobs + mask + seed + others
    return packed + _HASH.pack(_hash(packed))


def unpack(data: bytes) -> Record:
    """Decodes a record. Raises Damaged if the bytes are not a record of a known version."""
    try:
        version, flags, width, epoch, reward, size = _HEAD.unpack_from(data)
    except struct.error:
        raise Damaged(f"store: a response of {len(data)} bytes is cut short") from None
    if version not in (PLAIN, SEEDED, CHECKED, WEIGHED):
        raise Damaged(f"store: a response has version {version}; this server knows {PLAIN} to {WEIGHED}")
    scored, masked, seeded = (bool(flags & flag) for flag in (LOGPROBS, GENERATED, SEED))
    parts = (_HEAD.size, width * size, 4 * size * scored, -(-size // 8) * masked, _SEED.size * seeded)
    ends = np.cumsum(parts).tolist()
    if flags & ALTERNATIVES and ends[-1] + _LENGTH.size <= len(data):
        ends.append(ends[-1] + _LENGTH.size + _LENGTH.unpack_from(data, ends[-1])[0])
    hashed = version >= CHECKED
    length = ends[-1] + _HASH.size * hashed
    if width not in (2, 3, 4) or length != len(data):
        raise Damaged(f"store: a response of {len(data)} bytes should have {length}")
    if hashed and _HASH.unpack_from(data, ends[-1])[0] != _hash(data[: ends[-1]]):
        raise Damaged(f"store: a response of {len(data)} bytes does not match its checksum")
    wide = np.zeros((size, 4), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8, width * size, ends[0]).reshape(size, width)
    mask = np.unpackbits(np.frombuffer(data[ends[2] : ends[3]], np.uint8))[:size].tobytes()
    record = Record(
        wide.tobytes(),
        epoch,
        reward if flags & REWARD else None,
        data[ends[1] : ends[2]],
        mask,
        _SEED.unpack_from(data, ends[3])[0] if seeded else None,
        data[ends[4] + _LENGTH.size : ends[5]] if flags & ALTERNATIVES else b"",
    )
    return record if hashed else sound(record)


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & _HASHED


def sound(record: Record) -> Record:
    """Returns a record that has no checksum. Raises Damaged if it cannot be what was written."""
    arrays = (record.tokens, record.logprobs, record.generated)
    if not all(isinstance(part, bytes) for part in arrays):
        raise Damaged("store: the arrays of a response are not bytes")
    size, rest = divmod(len(record.tokens), INT32.itemsize)
    if rest or len(record.logprobs) not in (0, 4 * size) or len(record.generated) not in (0, size):
        raise Damaged(f"store: the arrays of a response have {', '.join(str(len(part)) for part in arrays)} bytes")
    if not isinstance(record.epoch, int) or not 0 <= record.epoch <= LAST_EPOCH:
        raise Damaged(f"store: the epoch of a response is {record.epoch!r}")
    tokens = np.frombuffer(record.tokens, INT32)
    if tokens.size and tokens.min() < 0:
        raise Damaged(f"store: a response has the token {tokens.min()}")
    return record


def checksum(record: Record, prompt: int) -> int:
    """Returns 32 bits that change if a record or the number of its prompt changes."""
    lengths = (len(record.tokens), len(record.logprobs), len(record.generated))
    given = (record.reward is not None) + 2 * (record.seed is not None)
    reward = (record.reward or 0.0) + 0.0  # SQLite keeps no negative zero
    about = _ABOUT.pack(prompt, record.epoch % _WRAP, reward, (record.seed or 0) % _WRAP, given, *lengths)
    hashed = xxhash.xxh3_64(about)
    for part in (record.tokens, record.logprobs, record.generated):
        hashed.update(part)
    return hashed.intdigest() & _HASHED


def guarded(alternatives: bytes) -> bytes | None:
    """Returns alternatives with a checksum of their own, for a column that older servers do not know; None for none."""
    return alternatives + _HASH.pack(_hash(alternatives)) if alternatives else None


def unguarded(data: object, tokens: int) -> bytes:
    """Returns the alternatives that `guarded` wrote for a response of so many tokens.

    Returns none if they are damaged: without them drafts are shorter, and the response itself is whole.
    """
    if not isinstance(data, bytes) or len(data) <= _HASH.size:
        return b""
    alternatives, hashed = data[: -_HASH.size], _HASH.unpack(data[-_HASH.size :])[0]
    return b"" if hashed != _hash(alternatives) or fault(alternatives, tokens) else alternatives
