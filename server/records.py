"""A response as bytes, for stores that keep nothing but bytes.

Little-endian: version, flags, width of a token, epoch, reward, number of tokens; then the tokens in 2, 3 or 4 bytes
each, whichever the largest one needs; then, where the flags say so, float32 log-probabilities, one bit a token for
what the policy generated, and the int64 seed. A vocabulary of 150,000 takes 3 bytes a token.

A response with a seed is of version 2, which older servers refuse by that number; all others stay readable for them.
"""

import struct

import numpy as np

from histospec.server.errors import StoreError
from histospec.server.store import Record
from histospec.server.wire import INT32

PLAIN, SEEDED = 1, 2  # the versions
REWARD, LOGPROBS, GENERATED, SEED = 1, 2, 4, 8
_HEAD = struct.Struct("<BBBqdI")
_SEED = struct.Struct("<q")


def pack(record: Record) -> bytes:
    """The bytes of a record."""
    tokens = np.frombuffer(record.tokens, INT32)
    largest = int(tokens.max()) if tokens.size else 0
    width = 2 if largest < 1 << 16 else 3 if largest < 1 << 24 else 4
    flags = REWARD * (record.reward is not None) | LOGPROBS * bool(record.logprobs) | GENERATED * bool(record.generated)
    version, seed = PLAIN, b""
    if record.seed is not None:
        version, flags, seed = SEEDED, flags | SEED, _SEED.pack(record.seed)
    head = _HEAD.pack(version, flags, width, record.epoch, 0.0 if record.reward is None else record.reward, tokens.size)
    narrow = tokens.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    mask = np.packbits(np.frombuffer(record.generated, np.uint8)).tobytes() if record.generated else b""
    return head + narrow + record.logprobs + mask + seed


def unpack(data: bytes) -> Record:
    """The record that was packed. Raises StoreError where it is not one."""
    try:
        version, flags, width, epoch, reward, size = _HEAD.unpack_from(data)
    except struct.error:
        raise StoreError(f"store: a response of {len(data)} bytes is cut short") from None
    if version not in (PLAIN, SEEDED):
        raise StoreError(f"store: a response of version {version}; this server knows {PLAIN} and {SEEDED}")
    scored, masked, seeded = (bool(flags & flag) for flag in (LOGPROBS, GENERATED, SEED))
    parts = (_HEAD.size, width * size, 4 * size * scored, -(-size // 8) * masked, _SEED.size * seeded)
    ends = np.cumsum(parts).tolist()
    if width not in (2, 3, 4) or ends[-1] != len(data):
        raise StoreError(f"store: a response of {len(data)} bytes should have {ends[-1]}")
    wide = np.zeros((size, 4), np.uint8)
    wide[:, :width] = np.frombuffer(data, np.uint8, width * size, ends[0]).reshape(size, width)
    mask = np.unpackbits(np.frombuffer(data[ends[2] : ends[3]], np.uint8))[:size].tobytes()
    return Record(
        wide.tobytes(),
        epoch,
        reward if flags & REWARD else None,
        data[ends[1] : ends[2]],
        mask,
        _SEED.unpack_from(data, ends[3])[0] if seeded else None,
    )
