"""Keys and fields of the Redis store, and what is in them.

    histospec:1:problem:{DIGEST}           hash: "about" is the problem, "rEPOCH TIME NUMBER" a response each
    histospec:1:problems:BUCKET:NAMESPACE  set: the digests of its problems
    histospec:1:estimators:NAMESPACE       hash: what the drafter of each shard learned
    histospec:1:namespaces                 sorted set: the newest epoch of each

DIGEST is the one that places the problem (`histospec.protocol.placement`).
"""

import struct
from collections.abc import Iterable
from typing import Any

from histospec.protocol.placement import problem_digest
from histospec.server.stores.interface import Problem

PREFIX = b"histospec:1:"
NAMESPACES = PREFIX + b"namespaces"
ABOUT = b"about"
BUCKETS = 64

FIELD = struct.Struct(">cQQ6s")  # sorts by epoch, then arrival


def digest_of(problem: Problem) -> bytes:
    """16 bytes that name a problem."""
    return problem_digest(problem.namespace, problem.prompt, problem.name)


def problem_key(digest: bytes) -> bytes:
    """The hash of a problem."""
    return PREFIX + b"problem:{" + digest.hex().encode() + b"}"


def bucket_key(namespace: bytes, bucket: int) -> bytes:
    """One of the sets that list the problems of a namespace."""
    return PREFIX + b"problems:%d:" % bucket + namespace


def problems_key(namespace: bytes, digest: bytes) -> bytes:
    """The set that lists a problem."""
    return bucket_key(namespace, digest[0] % BUCKETS)


def estimators_key(namespace: bytes) -> bytes:
    """The hash of what was learned in a namespace."""
    return PREFIX + b"estimators:" + namespace


def epoch_of(field: bytes) -> int:
    """The epoch in the name of a response's field."""
    return int(FIELD.unpack(field)[1])


def about_of(problem: Problem) -> bytes:
    """A problem as bytes."""
    namespace, name = problem.namespace.encode(), problem.name.encode()
    return struct.pack("<II", len(namespace), len(name)) + namespace + name + problem.prompt


def problem_of(about: bytes) -> Problem:
    """The problem that `about_of` made them of."""
    namespace, name = struct.unpack_from("<II", about)
    text = about[8:]
    return Problem(
        text[:namespace].decode(), text[namespace + name :], text[namespace : namespace + name].decode()
    )  # fmt: skip


def same(held: Problem, asked: Problem) -> bool:
    """Whether what is stored under a digest is this problem: an explicit name decides, else all tokens."""
    if (held.namespace, held.name) != (asked.namespace, asked.name):
        return False
    return bool(held.name) or held.prompt == asked.prompt


def pairs(answer: Any) -> dict[bytes, bytes]:
    """A hash, which comes as a list or as a dictionary."""
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


def response_names(names: Iterable[bytes]) -> list[bytes]:
    """The fields of responses among the names of a hash, oldest first."""
    return sorted(name for name in names if name != ABOUT)
