"""Keys and fields of the Redis store, and their contents.

    histospec:1:problem:{DIGEST}           hash: "about", the problem; each "rEPOCH TIME NUMBER RANDOM" is a response
    histospec:1:problems:BUCKET:NAMESPACE  set: the digests of its problems
    histospec:1:estimators:NAMESPACE       hash: the estimator of each shard
    histospec:1:namespaces                 sorted set: the newest epoch of each namespace
    histospec:1:generations                hash: "DROPS:RANDOM" of each namespace, see `generation`

The sets are an index of the hashes: `Lists.complete` builds them again where they lack a hash.

DIGEST also places the problem on a shard (`histospec.protocol.placement`).
"""

import secrets
import struct
import time
from collections.abc import Iterable
from typing import Any

from histospec.protocol.placement import problem_digest
from histospec.server.stores.interface import Problem

PREFIX = b"histospec:1:"
NAMESPACES = PREFIX + b"namespaces"
GENERATIONS = PREFIX + b"generations"
ABOUT = b"about"
BUCKETS = 64

FIELD = struct.Struct(">cQQ6s")  # sorts by epoch, then arrival

PUT = """
local about = redis.call('HGET', KEYS[1], 'about')
if not about then
    if ARGV[1] == '' then return -1 end
    redis.call('HSET', KEYS[1], 'about', ARGV[1])
elseif ARGV[1] ~= '' and string.sub(about, 1, ARGV[2]) ~= string.sub(ARGV[1], 1, ARGV[2]) then
    return -2
end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if ARGV[3] == '0' then redis.call('PERSIST', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return redis.call('HLEN', KEYS[1]) - 1
"""
"""Adds responses to the hash of a problem, which never has responses without "about". Returns how many it has then.

Arguments: the problem, or nothing if it was compared before; how many bytes of it to compare; how many milliseconds it
stays, 0 for ever; then names and values.
"""
GONE, OTHER = -1, -2
"""Answers of PUT: the hash of a compared problem is gone; another problem has the hash."""


def digest_of(problem: Problem) -> bytes:
    """Returns the 16 bytes that identify a problem."""
    return problem_digest(problem.namespace, problem.prompt, problem.name)


def problem_key(digest: bytes) -> bytes:
    """Returns the key of a problem's hash."""
    return PREFIX + b"problem:{" + digest.hex().encode() + b"}"


def bucket_key(namespace: bytes, bucket: int) -> bytes:
    """Returns the key of one of the sets that list the problems of a namespace."""
    return PREFIX + b"problems:%d:" % bucket + namespace


def problems_key(namespace: bytes, digest: bytes) -> bytes:
    """Returns the key of the set that lists a problem."""
    return bucket_key(namespace, digest[0] % BUCKETS)


def digest_in(key: bytes) -> bytes:
    """Returns the digest in the key of a problem's hash. Raises ValueError if it has none."""
    digest = bytes.fromhex(key.removeprefix(PREFIX + b"problem:{").removesuffix(b"}").decode("ascii"))
    if problem_key(digest) != key:
        raise ValueError(f"{key!r} is not the key of a problem")
    return digest


def generation(drops: int = 0) -> bytes:
    """Returns a new generation of a namespace's contents. A drop makes one with another number, a rewind with the same.

    Contents that were lost lack one, or get one with a smaller number from the next write.
    """
    return b"%d:" % drops + secrets.token_hex(8).encode()


def drops_of(generation: bytes | None) -> int:
    """Returns how often the namespace was dropped."""
    number = (generation or b"").partition(b":")[0]
    return int(number) if number.isdigit() else 0


def estimators_key(namespace: bytes) -> bytes:
    """Returns the key of the estimators of a namespace."""
    return PREFIX + b"estimators:" + namespace


def response_fields(epochs: Iterable[int]) -> list[bytes]:
    """Returns new names for the fields of responses that arrive now, in this order."""
    now, unique = time.time_ns(), secrets.token_bytes(3)
    return [FIELD.pack(b"r", epoch, now, n.to_bytes(3, "big") + unique) for n, epoch in enumerate(epochs)]


def epoch_of(field: bytes) -> int:
    """Returns the epoch from the name of a response's field."""
    return int(FIELD.unpack(field)[1])


def about_of(problem: Problem) -> bytes:
    """Encodes a problem."""
    namespace, name = problem.namespace.encode(), problem.name.encode()
    return struct.pack("<II", len(namespace), len(name)) + namespace + name + problem.prompt


def problem_of(about: bytes) -> Problem:
    """Decodes a problem that `about_of` encoded."""
    namespace, name = struct.unpack_from("<II", about)
    text = about[8:]
    return Problem(
        text[:namespace].decode(), text[namespace + name :], text[namespace : namespace + name].decode()
    )  # fmt: skip


def compared_size(problem: Problem) -> int:
    """Returns how many bytes of `about_of` two prompts of one problem have in common: all of them without a name."""
    about = about_of(problem.identity)
    return len(about) if problem.name else len(about_of(problem)) + 1


def same(held: Problem, asked: Problem) -> bool:
    """Returns whether a stored problem is the requested one: explicit names must match, or else all tokens."""
    if (held.namespace, held.name) != (asked.namespace, asked.name):
        return False
    return bool(held.name) or held.prompt == asked.prompt


def pairs(answer: Any) -> dict[bytes, bytes]:
    """Returns the fields of a hash, which Redis sends as a list or as a dictionary."""
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


def response_names(names: Iterable[bytes]) -> list[bytes]:
    """Returns the fields of responses among the names of a hash, oldest first."""
    return sorted(name for name in names if len(name) == FIELD.size and name.startswith(b"r"))
