"""The store in Redis or Valkey, alone or as a Cluster, which all shards share.

    histospec:1:problem:{DIGEST}           hash: "about" is the problem, "rEPOCH TIME NUMBER" a response each
    histospec:1:problems:BUCKET:NAMESPACE  set: the digests of its problems
    histospec:1:estimators:NAMESPACE       hash: what the drafter of each shard learned
    histospec:1:namespaces                 sorted set: the newest epoch of each

DIGEST is the one that places the problem (`histospec.client.routing`); the tokens in "about" are compared all the same,
before the first write and at every read. A problem is listed before its first response is written, so that every
response can be found from its namespace. The name of a response's field is chosen once: writing it again after an
answer was lost changes nothing.
"""

import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, count, groupby, repeat
from typing import Any, TypeVar

import redis
import structlog

from histospec.client.routing import problem_digest
from histospec.server import records
from histospec.server.errors import StoreError, StoreFull
from histospec.server.group_commit import GroupCommit, Work
from histospec.server.redis_servers import TRANSIENT, Command, Location, Servers
from histospec.server.store import Batch, Problem, Record, Store, total_size

log = structlog.get_logger()
T = TypeVar("T")

PREFIX = b"histospec:1:"
NAMESPACES = PREFIX + b"namespaces"
ABOUT = b"about"
BUCKETS = 64
PAGE = 500  # problems asked for in one round trip

# How long a group is tried again while servers fail over, before its callers are told that it is not kept. Once that
# has happened, the next groups are tried once, until one succeeds.
PATIENCE = 10.0
PAUSES = (0.05, 0.1, 0.2, 0.5)  # seconds between tries, the last one again and again
KNOWN_PROBLEMS = 200_000  # of which the epochs are remembered, so that a write need not ask for them

_FIELD = struct.Struct(">cQQ6s")  # sorts by epoch, then arrival


class _Append:
    """A batch as commands. Made once, and so the same however often it is sent."""

    def __init__(self, batch: Batch, names: Iterator[bytes]) -> None:
        problem = batch.problem
        self.problem = problem
        self.namespace = problem.namespace.encode()
        self.digest = _digest(problem)
        self.key = _problem_key(self.digest)
        self.about = _about(problem)
        self.epochs = {record.epoch for record in batch.records}
        fields = [(next(names), record) for record in batch.records]
        self.fields = [_FIELD.pack(b"r", r.epoch, time.time_ns(), name) for name, r in fields]
        self.values = [records.pack(r) for _, r in fields]


class RedisStore(Store):
    """See the module. `shard` names this server among those that share the store."""

    whole_at_start = False

    def __init__(self, location: Location, history_epochs: int, shard: str) -> None:
        self._servers = Servers(location)
        self._history_epochs = history_epochs
        self._shard = shard.encode()
        own = secrets.token_bytes(3)
        self._names = (own + (number & 0xFFFFFF).to_bytes(3, "big") for number in count())
        self._names_lock = threading.Lock()
        # Only the writer's thread touches these.
        self._epochs: OrderedDict[bytes, set[int]] = OrderedDict()  # by digest, as far as known
        self._newest: dict[bytes, int] = {}
        self._away = False
        self._writer: GroupCommit[_Append | list[Command] | partial[int]] = GroupCommit(
            self._write, self._servers.close
        )

    # Writing

    def append(self, batch: Batch) -> "Future[None]":
        """See Store."""
        with self._names_lock:
            work = _Append(batch, self._names)
        return self._writer.submit(work, total_size(batch.records) + len(batch.problem.prompt))

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store."""
        name = namespace.encode()
        listed: Command = ("ZADD", NAMESPACES, "GT", 0, name)
        return self._writer.submit([listed, ("HSET", _estimators_key(name), self._shard, state)], len(state))

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""
        return self._writer.submit(partial(self._drop, namespace.encode()), 0)

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""
        return self._writer.submit(partial(self._rewind, namespace.encode(), epoch), 0)

    def _write(self, group: list[Work[Any]]) -> None:
        """In order; what comes together is sent together."""
        for kind, some in groupby(group, key=lambda work: type(work.what)):
            works = list(some)
            what = [work.what for work in works]
            results: list[Any]
            try:
                if kind is _Append:
                    results = self._patiently(self._append, what)
                elif kind is list:
                    self._patiently(self._servers.run, [command for commands in what for command in commands], True)
                    results = [None] * len(works)
                else:
                    results = [self._patiently(run) for run in what]
            except redis.RedisError as error:
                results = [_explain(error)] * len(works)
            for work, result in zip(works, results, strict=True):
                if isinstance(result, StoreError):
                    self._writer.fail(work, result)
                else:
                    self._writer.settle(work, result)

    def _patiently(self, run: Callable[..., T], *arguments: Any) -> T:
        until = time.monotonic() + (0 if self._away else PATIENCE)
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                result = run(*arguments)
                break
            except TRANSIENT as error:
                if time.monotonic() >= until:
                    if not self._away:
                        log.warning("the store is away; responses are refused until it is back", reason=str(error))
                    self._away = True
                    raise
                time.sleep(pause)
        if self._away:
            log.info("the store is back")
        self._away = False
        return result

    def _append(self, works: Sequence[_Append]) -> list[StoreError | None]:
        """What could not be written of each, None where it was."""
        unknown = [work for work in works if work.digest not in self._epochs]
        strangers = self._introduce(works, unknown)
        mine = [work for work in works if work.digest not in strangers]
        writes: list[Command] = [
            ("HSET", work.key, *(part for pair in zip(work.fields, work.values, strict=True) for part in pair))
            for work in mine
        ]
        fresh = {work.digest: work.key for work in mine if not work.epochs <= self._epochs.get(work.digest, set())}
        answers = self._servers.run([*writes, *(("HKEYS", key) for key in fresh.values())], replicas=True)
        for work in mine:
            self._newest[work.namespace] = max(self._newest.get(work.namespace, -1), *work.epochs)
        self._slide(dict(zip(fresh, answers[len(writes) :], strict=True)))
        collision = StoreError("store: another problem has the same digest; nothing of this request is kept")
        return [collision if work.digest in strangers else None for work in works]

    def _introduce(self, works: Sequence[_Append], unknown: Sequence[_Append]) -> set[bytes]:
        """Lists namespaces and problems. -> digests that belong to another problem."""
        first: list[Command] = []
        for work in works:
            newest = max(work.epochs)
            if newest > self._newest.get(work.namespace, -1):
                first.append(("ZADD", NAMESPACES, "GT", newest, work.namespace))
        first += [("SADD", _problems_key(work.namespace, work.digest), work.digest) for work in unknown]
        first += [("HSETNX", work.key, ABOUT, work.about) for work in unknown]
        abouts: list[Command] = [("HGET", work.key, ABOUT) for work in unknown]
        answers = self._servers.run(first + abouts, replicas=True) if first else []
        held = answers[len(first) :]
        return {w.digest for w, about in zip(unknown, held, strict=True) if not _same(_problem(about), w.problem)}

    def _slide(self, fields: dict[bytes, list[bytes]]) -> None:
        """Keeps the newest epochs of these problems, by digest."""
        deletions: list[Command] = []
        for digest, names in fields.items():
            epochs = {_epoch(name) for name in names if name != ABOUT}
            kept = set(sorted(epochs)[-self._history_epochs :])
            self._epochs[digest] = kept
            self._epochs.move_to_end(digest)
            if old := [name for name in names if name != ABOUT and _epoch(name) not in kept]:
                deletions.append(("HDEL", _problem_key(digest), *old))
        while len(self._epochs) > KNOWN_PROBLEMS:
            self._epochs.popitem(last=False)
        if deletions:
            self._servers.run(deletions)

    def _drop(self, namespace: bytes) -> int:
        dropped = 0
        for bucket in range(BUCKETS):
            key = _bucket_key(namespace, bucket)
            digests = self._members(key)
            for page in _pages(digests):
                keys = [_problem_key(digest) for digest in page]
                answers = self._servers.run([("HLEN", k) for k in keys] + [("UNLINK", k) for k in keys])
                dropped += sum(max(0, n - 1) for n in answers[: len(keys)])
            if digests:
                self._servers.run([("UNLINK", key)])
        self._servers.run([("UNLINK", _estimators_key(namespace)), ("ZREM", NAMESPACES, namespace)])
        self._epochs.clear()
        self._newest.pop(namespace, None)
        return dropped

    def _rewind(self, namespace: bytes, epoch: int) -> int:
        forgotten = 0
        for bucket in range(BUCKETS):
            for page in _pages(self._members(_bucket_key(namespace, bucket))):
                keys = [_problem_key(digest) for digest in page]
                answers = self._servers.run([("HKEYS", key) for key in keys])
                newer = [[n for n in names if n != ABOUT and _epoch(n) > epoch] for names in answers]
                deletions: list[Command] = [("HDEL", key, *old) for key, old in zip(keys, newer, strict=True) if old]
                if deletions:
                    forgotten += sum(self._servers.run(deletions, replicas=True))
        self._servers.run([("ZADD", NAMESPACES, "XX", "LT", epoch, namespace)])
        self._epochs.clear()
        self._newest.pop(namespace, None)
        return forgotten

    # Reading

    def history(self, problem: Problem, limit: int = 0) -> list[Record]:
        """See Store."""
        (answer,) = self._read([("HGETALL", _problem_key(_digest(problem)))])
        return _records(answer, problem)[-limit:]

    def newest_epochs(self) -> dict[str, int]:
        """See Store."""
        (answer,) = self._read([("ZRANGE", NAMESPACES, 0, -1, "WITHSCORES")])
        pairs = zip(answer[::2], answer[1::2], strict=True) if answer and isinstance(answer[0], bytes) else answer
        return {name.decode(): int(float(score)) for name, score in pairs}

    def estimators(self) -> dict[str, bytes]:
        """See Store. Where this shard has saved none, what another one has learned."""
        names = [name.encode() for name in self.newest_epochs()]
        answers = self._read([("HGETALL", _estimators_key(name)) for name in names])
        found = {name.decode(): _pairs(answer) for name, answer in zip(names, answers, strict=True)}
        return {name: states.get(self._shard, *list(states.values())[:1]) for name, states in found.items() if states}

    def load(self) -> Iterator[Batch]:
        """See Store. All problems of all shards, one after the other."""
        for namespace in self.newest_epochs():
            for bucket in range(BUCKETS):
                (digests,) = self._read([("SMEMBERS", _bucket_key(namespace.encode(), bucket))])
                for page in _pages(sorted(digests)):
                    for answer in self._read([("HGETALL", _problem_key(digest)) for digest in page]):
                        if (about := _pairs(answer).get(ABOUT)) is None:
                            continue
                        problem = _problem(about)
                        for _, some in groupby(_records(answer, problem), key=lambda record: record.epoch):
                            yield Batch(problem, list(some))

    def count(self) -> int:
        """See Store."""
        total = 0
        for namespace in self.newest_epochs():
            for bucket in range(BUCKETS):
                (digests,) = self._read([("SMEMBERS", _bucket_key(namespace.encode(), bucket))])
                for page in _pages(digests):
                    lengths = self._read([("HLEN", _problem_key(digest)) for digest in page])
                    total += sum(max(0, length - 1) for length in lengths)
        return total

    def _members(self, key: bytes) -> list[bytes]:
        (answer,) = self._servers.run([("SMEMBERS", key)])
        return list(answer)

    def _read(self, commands: Sequence[Command]) -> list[Any]:
        try:
            try:
                return self._servers.run(commands)
            except TRANSIENT:  # a connection that idled too long, a server that moved
                return self._servers.run(commands)
        except redis.RedisError as error:
            raise _explain(error) from error

    def close(self) -> None:
        """See Store."""
        self._writer.close()


# Keys and fields


def _digest(problem: Problem) -> bytes:
    return problem_digest(problem.namespace, problem.prompt, problem.name)


def _problem_key(digest: bytes) -> bytes:
    return PREFIX + b"problem:{" + digest.hex().encode() + b"}"


def _bucket_key(namespace: bytes, bucket: int) -> bytes:
    return PREFIX + b"problems:%d:" % bucket + namespace


def _problems_key(namespace: bytes, digest: bytes) -> bytes:
    return _bucket_key(namespace, digest[0] % BUCKETS)


def _estimators_key(namespace: bytes) -> bytes:
    return PREFIX + b"estimators:" + namespace


def _epoch(field: bytes) -> int:
    return int(_FIELD.unpack(field)[1])


def _about(problem: Problem) -> bytes:
    namespace, name = problem.namespace.encode(), problem.name.encode()
    return struct.pack("<II", len(namespace), len(name)) + namespace + name + problem.prompt


def _problem(about: bytes) -> Problem:
    namespace, name = struct.unpack_from("<II", about)
    text = about[8:]
    return Problem(
        text[:namespace].decode(), text[namespace + name :], text[namespace : namespace + name].decode()
    )  # fmt: skip


def _same(held: Problem, asked: Problem) -> bool:
    """Whether what is stored under a digest is this problem: an explicit name decides, else all tokens."""
    if (held.namespace, held.name) != (asked.namespace, asked.name):
        return False
    return bool(held.name) or held.prompt == asked.prompt


def _pairs(answer: Any) -> dict[bytes, bytes]:
    """A hash, which comes as a list or as a dictionary."""
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


def _records(answer: Any, problem: Problem) -> list[Record]:
    fields = _pairs(answer)
    about = fields.pop(ABOUT, None)
    if about is not None and not _same(_problem(about), problem):
        return []
    return [records.unpack(fields[name]) for name in sorted(fields)]


def _pages(items: Iterable[bytes]) -> Iterator[list[bytes]]:
    everything = list(items)
    for start in range(0, len(everything), PAGE):
        yield everything[start : start + PAGE]


def _explain(error: Exception) -> StoreError:
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreFull(f"store: the Redis server is full ({error}); nothing of this request is kept")
    if "No space left on device" in str(error):
        return StoreFull(f"store: the disk of the Redis server is full ({error}); nothing of this request is kept")
    return StoreError(f"store: {error}; nothing of this request is kept")
