"""The lists of problems in Redis: an index of the problems' hashes, which is made again where Redis has lost it."""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import redis
import structlog

from histospec.server.stores.interface import Problem
from histospec.server.stores.records import DamageCount
from histospec.server.stores.redis.keys import (
    ABOUT,
    BUCKETS,
    GENERATIONS,
    NAMESPACES,
    PREFIX,
    bucket_key,
    digest_in,
    epoch_of,
    problem_key,
    problem_of,
    problems_key,
    response_names,
)
from histospec.server.stores.redis.servers import Command, Servers

log = structlog.get_logger()
Run = Callable[[Sequence[Command]], list[Any]]

PAGE = 500  # problems per round trip
RELISTED = 64  # problems per round trip


class Lists:
    """The lists of all namespaces. `damage` counts hashes that are no problems."""

    def __init__(self, servers: Servers, damage: DamageCount) -> None:
        self._servers = servers
        self._damage = damage

    def complete(self) -> None:
        """Lists problems whose list has lost them, for example because Redis evicted it. Raises redis.RedisError."""
        types = (NAMESPACES, b"zset"), (GENERATIONS, b"hash")
        self._replace_others([(key, kind) for key, kind in types])
        (answer,) = self._servers.run([("ZRANGE", NAMESPACES, 0, -1)])
        listed = [np.empty(0, np.uint64)]
        for namespace in answer:
            lists = [bucket_key(namespace, bucket) for bucket in range(BUCKETS)]
            found = self._servers.each([("SMEMBERS", key) for key in lists])
            wrong = [(key, b"set") for key, some in zip(lists, found, strict=True) if isinstance(some, Exception)]
            if wrong:
                self._replace_others(wrong)
                found = self._servers.run([("SMEMBERS", key) for key in lists])
            listed.append(_numbers(digest for some in found for digest in some))
        known = np.sort(np.concatenate(listed))
        relisted = 0
        for keys in self._servers.keys(PREFIX + b"problem:*"):
            digests = []
            for key in keys:
                with suppress(ValueError):
                    digests.append(digest_in(key))
            mine = _numbers(digests)
            there = np.searchsorted(known, mine, "right") > np.searchsorted(known, mine)
            relisted += self._relist([digest for digest, listed_ in zip(digests, there, strict=True) if not listed_])
        if relisted:
            log.warning("Redis lost entries of its lists; they were made again", problems=relisted)

    def _replace_others(self, kinds: Sequence[tuple[bytes, bytes]]) -> None:
        """Deletes keys of another type than these: nothing of ours can be in them."""
        types = self._servers.run([("TYPE", key) for key, _ in kinds])
        wrong = [key for (key, kind), held in zip(kinds, types, strict=True) if held not in (kind, b"none")]
        if wrong:
            log.error("another program has written to keys of the store; they are replaced", keys=wrong[:3])
            self._servers.run([("UNLINK", key) for key in wrong])

    def _relist(self, digests: Sequence[bytes]) -> int:
        """Lists those of these problems that exist. Returns how many."""
        count = 0
        for start in range(0, len(digests), RELISTED):
            some = digests[start : start + RELISTED]
            keys = [problem_key(digest) for digest in some]
            abouts = self._servers.each([("HGET", key, ABOUT) for key in keys])
            names = self._servers.each([("HKEYS", key) for key in keys])
            if wrong := [key for key, about in zip(keys, abouts, strict=True) if isinstance(about, Exception)]:
                self._replace_others([(key, b"hash") for key in wrong])
            for digest, key, about, held in zip(some, keys, abouts, names, strict=True):
                problem = self.problem(key, about)
                if problem is None or isinstance(held, Exception):
                    continue
                namespace = problem.namespace.encode()
                members = problems_key(namespace, digest)
                self._servers.run([("SADD", members, digest)], True)
                epoch = max(map(epoch_of, response_names(held)), default=0)
                (there,) = self._servers.run([("EXISTS", key)])
                if there:
                    self._servers.run([("ZADD", NAMESPACES, "GT", epoch, namespace)], True)
                    count += 1
                else:  # dropped meanwhile
                    self._servers.run([("SREM", members, digest)])
        return count

    def problem(self, key: bytes, about: Any) -> Problem | None:
        """Returns the problem of a hash; None if Redis has none there, or something else."""
        if about is None:
            return None
        try:
            if isinstance(about, redis.ResponseError):
                raise about
            return problem_of(about)
        except (redis.ResponseError, struct.error, UnicodeDecodeError) as error:
            self._damage.found((key, b""), f"{key.decode()} in Redis is not a problem: {error}")
            return None


def walk(namespace: bytes, run: Run) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yields pages of a namespace's problems: the key of a set that lists them, and some of its digests."""
    for bucket in range(BUCKETS):
        members = bucket_key(namespace, bucket)
        (answer,) = run([("SMEMBERS", members)])
        digests = sorted(answer)
        for start in range(0, len(digests), PAGE):
            yield members, digests[start : start + PAGE]


def tidy(members: bytes, forgotten: Sequence[bytes], run: Run) -> None:
    """Removes problems that Redis has deleted from their list; a concurrent write lists its problem again."""
    if not forgotten:
        return
    run([("SREM", members, *forgotten)])
    there = run([("EXISTS", problem_key(digest)) for digest in forgotten])
    if back := [digest for digest, exists in zip(forgotten, there, strict=True) if exists]:
        run([("SADD", members, *back)])


def _numbers(digests: Iterable[bytes]) -> Any:
    """Returns the first halves of digests as an array: a namespace may have millions."""
    return np.frombuffer(b"".join(digests), np.uint64)[::2]
