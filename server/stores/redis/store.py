"""The store in Redis or Valkey, alone or as a Cluster, which all shards share.

`keys` describes the layout. The store finds a problem by its digest, and also compares the tokens before the first
write and at every read. It lists a problem before it writes the first response, so that every response can be found
from its namespace. It chooses the name of a response's field once: after a lost answer, writing the response again
changes nothing.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, groupby, repeat
from typing import Any, TypeVar

import redis
import structlog

from histospec.server.errors import Damaged, StoreError, StoreFull
from histospec.server.stores import records
from histospec.server.stores.group_commit import MAX_BACKLOG, GroupCommit, Work
from histospec.server.stores.interface import (
    HISTORY_RESPONSES,
    LAST_EPOCH,
    Problem,
    Record,
    ResponseBatch,
    Store,
    StoreSize,
    total_size,
    within,
)
from histospec.server.stores.redis.keys import (
    ABOUT,
    BUCKETS,
    NAMESPACES,
    about_of,
    bucket_key,
    digest_of,
    epoch_of,
    estimators_key,
    pairs,
    problem_key,
    problem_of,
    problems_key,
    response_fields,
    response_names,
    same,
)
from histospec.server.stores.redis.servers import TRANSIENT, Command, Memory, Servers

log = structlog.get_logger()
T = TypeVar("T")
Run = Callable[[Sequence[Command]], list[Any]]

PAGE = 500  # problems per round trip
READ_PAGE = 64  # responses per round trip

PATIENCE = 10.0
PAUSES = (0.05, 0.1, 0.2, 0.5)  # seconds between tries; the last one repeats
KNOWN_PROBLEMS = 200_000  # problems whose epochs are remembered, so that a write need not ask for them


class _Append:
    """A batch as commands. Built once, so that every retry sends the same commands."""

    def __init__(self, batch: ResponseBatch) -> None:
        problem = batch.problem
        self.problem = problem
        self.namespace = problem.namespace.encode()
        self.digest = digest_of(problem)
        self.key = problem_key(self.digest)
        self.about = about_of(problem)
        self.epochs = {record.epoch for record in batch.records}
        self.fields = response_fields(record.epoch for record in batch.records)
        self.values = [records.pack(record) for record in batch.records]


class RedisStore(Store):
    """See the module. `shard` names this server among those that share the store.

    Deletes a problem `retention` seconds after its last write; never if that is 0. Reads the newest
    `history_responses` of a problem, and may hold an eighth more. Retries a group for `patience` seconds while servers
    fail over, before its callers get an error; after such an error, each further group is tried once, until one
    succeeds.
    """

    whole_at_start = False

    def __init__(
        self,
        servers: Servers,
        history_epochs: int,
        shard: str,
        *,
        history_responses: int = HISTORY_RESPONSES,
        retention: float = 0.0,
        max_backlog: int = MAX_BACKLOG,
        patience: float = PATIENCE,
    ) -> None:
        self._retention = int(1000 * retention)  # milliseconds
        self._servers = servers
        self._patience = patience
        self._memory = Memory(servers.memory)
        self._history_epochs = history_epochs
        self._history_responses = history_responses
        # Only the names of all responses tell which are the oldest, so old ones are not removed with every write.
        self._slack = history_responses // 8
        self._damage = records.DamageCount()
        self._shard = shard.encode()
        # Only the writer's thread uses these.
        self._epochs: OrderedDict[bytes, set[int]] = OrderedDict()  # by digest: the known epochs
        self._newest: dict[bytes, int] = {}
        self._away = False
        self._writer: GroupCommit[_Append | list[Command] | partial[int]] = GroupCommit(
            self._write, servers.close, max_backlog
        )

    # Writing

    @property
    def waiting_bytes(self) -> int:
        """See Store."""
        return self._writer.backlog

    @property
    def waiting_limit(self) -> int:
        """See Store."""
        return self._writer.max_backlog

    @property
    def size(self) -> StoreSize:
        """See Store. Returns the last known values; asks Redis at most every ten seconds."""
        return StoreSize(*self._memory.look())

    @property
    def outage(self) -> str:
        """See Store. Returns what was last seen; asks Redis at most every ten seconds."""
        self._memory.look()
        return self._memory.outage

    def append(self, batch: ResponseBatch) -> "Future[None]":
        """See Store."""
        return self._writer.submit(_Append(batch), batch.size)

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store."""
        name = namespace.encode()
        listed: Command = ("ZADD", NAMESPACES, "GT", 0, name)
        return self._writer.submit([listed, ("HSET", estimators_key(name), self._shard, state)], len(state))

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""
        return self._writer.submit(partial(self._drop, namespace.encode()), 0)

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""
        return self._writer.submit(partial(self._rewind, namespace.encode(), epoch), 0)

    def _write(self, group: list[Work[Any]]) -> None:
        """Writes the group in order; sends neighbouring appends together."""
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
        until = time.monotonic() + (0 if self._away else self._patience)
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
        """Writes batches. Returns an error for each that was not written, None for the others."""
        # Retention may have deleted a problem, so every write lists it again.
        unknown = [work for work in works if self._retention or work.digest not in self._epochs]
        collisions = self._list_problems(works, unknown)
        mine = [work for work in works if work.digest not in collisions]
        writes: list[Command] = [
            ("HSET", work.key, *(part for pair in zip(work.fields, work.values, strict=True) for part in pair))
            for work in mine
        ]
        if self._retention:  # another shard may have removed a just listed problem from its list, see `_tidy`
            writes += [("SADD", problems_key(work.namespace, work.digest), work.digest) for work in mine]
        sizes: dict[bytes, Command] = {work.digest: ("HLEN", work.key) for work in mine}
        answers = self._servers.run([*writes, *sizes.values()], replicas=True)
        full = {
            digest
            for digest, size in zip(sizes, answers[len(writes) :], strict=True)
            if size - 1 > self._history_responses + self._slack
        }
        fresh = {
            work.digest: work.key
            for work in mine
            if work.digest in full or not work.epochs <= self._epochs.get(work.digest, set())
        }
        for work in mine:
            self._newest[work.namespace] = max(self._newest.get(work.namespace, -1), *work.epochs)
        if fresh:
            names = self._servers.run([("HKEYS", key) for key in fresh.values()])
            self._slide(dict(zip(fresh, names, strict=True)))
        error = StoreError("store: another problem has the same digest; nothing of this request is kept")
        return [error if work.digest in collisions else None for work in works]

    def _list_problems(self, works: Sequence[_Append], unknown: Sequence[_Append]) -> set[bytes]:
        """Lists namespaces and problems. Returns digests that belong to another problem."""
        first: list[Command] = []
        for work in works:
            newest = max(work.epochs)
            if newest > self._newest.get(work.namespace, -1):
                first.append(("ZADD", NAMESPACES, "GT", newest, work.namespace))
        first += [("SADD", problems_key(work.namespace, work.digest), work.digest) for work in unknown]
        first += [("HSETNX", work.key, ABOUT, work.about) for work in unknown]
        first += [self._lease(work.key) for work in unknown]
        abouts: list[Command] = [("HGET", work.key, ABOUT) for work in unknown]
        answers = self._servers.run(first + abouts, replicas=True) if first else []
        held = answers[len(first) :]
        return {w.digest for w, about in zip(unknown, held, strict=True) if not same(problem_of(about), w.problem)}

    def _lease(self, key: bytes) -> Command:
        """Returns the command that sets how long a problem stays from now on."""
        return ("PEXPIRE", key, self._retention) if self._retention else ("PERSIST", key)

    def _slide(self, fields: dict[bytes, list[bytes]]) -> None:
        """Keeps only the newest epochs of these problems, by digest, and of these the newest responses."""
        deletions: list[Command] = []
        for digest, answer in fields.items():
            names = response_names(answer)
            kept = set(sorted({epoch_of(name) for name in names})[-self._history_epochs :])
            self._epochs[digest] = kept
            self._epochs.move_to_end(digest)
            stay = [name for name in names if epoch_of(name) in kept]
            if len(stay) > self._history_responses + self._slack:
                stay = stay[-self._history_responses :]
            if old := names[: len(names) - len(stay)]:  # the names sort by epoch, then arrival
                deletions += [
                    ("HDEL", problem_key(digest), *old[start : start + PAGE]) for start in range(0, len(old), PAGE)
                ]
        while len(self._epochs) > KNOWN_PROBLEMS:
            self._epochs.popitem(last=False)
        if deletions:
            self._servers.run(deletions)

    def _drop(self, namespace: bytes) -> int:
        dropped = 0
        for members, digests in self._walk(namespace, self._servers.run):
            keys = [problem_key(digest) for digest in digests]
            answers = self._servers.run([("HLEN", k) for k in keys] + [("UNLINK", k) for k in keys])
            dropped += sum(max(0, n - 1) for n in answers[: len(keys)])
            self._servers.run([("SREM", members, *digests)])
        self._servers.run([("UNLINK", estimators_key(namespace)), ("ZREM", NAMESPACES, namespace)])
        self._epochs.clear()
        self._newest.pop(namespace, None)
        return dropped

    def _rewind(self, namespace: bytes, epoch: int) -> int:
        forgotten = 0
        for members, digests in self._walk(namespace, self._servers.run):
            keys = [problem_key(digest) for digest in digests]
            answers = self._servers.run([("HKEYS", key) for key in keys])
            self._tidy(members, [d for d, names in zip(digests, answers, strict=True) if not names], self._servers.run)
            newer = [[n for n in names if n != ABOUT and epoch_of(n) > epoch] for names in answers]
            deletions: list[Command] = [("HDEL", key, *old) for key, old in zip(keys, newer, strict=True) if old]
            if deletions:
                forgotten += sum(self._servers.run(deletions, replicas=True))
        self._servers.run([("ZADD", NAMESPACES, "XX", "LT", epoch, namespace)])
        self._epochs.clear()
        self._newest.pop(namespace, None)
        return forgotten

    def _walk(self, namespace: bytes, run: Run) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yields pages of a namespace's problems: the key of a set that lists them, and some of its digests."""
        for bucket in range(BUCKETS):
            members = bucket_key(namespace, bucket)
            (answer,) = run([("SMEMBERS", members)])
            digests = sorted(answer)
            for start in range(0, len(digests), PAGE):
                yield members, digests[start : start + PAGE]

    def _tidy(self, members: bytes, forgotten: Sequence[bytes], run: Run) -> None:
        """Removes problems that Redis has deleted from their list; a concurrent write lists its problem again."""
        if not forgotten:
            return
        run([("SREM", members, *forgotten)])
        there = run([("EXISTS", problem_key(digest)) for digest in forgotten])
        if back := [digest for digest, exists in zip(forgotten, there, strict=True) if exists]:
            run([("SADD", members, *back)])

    # Reading

    def history(self, problem: Problem, limit: int = 0, max_bytes: int | None = None) -> list[Record]:
        """See Reader."""
        key = problem_key(digest_of(problem))
        about, names = self._read([("HGET", key, ABOUT), ("HKEYS", key)])
        if about is not None and not same(problem_of(about), problem):
            return []
        return self._records(key, names, limit, max_bytes)

    def _records(
        self, key: bytes, names: Sequence[bytes], limit: int = 0, max_bytes: int | None = None
    ) -> list[Record]:
        """Returns the newest responses of a problem, oldest first, without damaged ones."""
        newest = response_names(names)[-min(limit or self._history_responses, self._history_responses) :]
        found: list[Record] = []
        size = 0
        for end in range(len(newest), 0, -READ_PAGE):
            page = newest[max(0, end - READ_PAGE) : end]
            (answers,) = self._read([("HMGET", key, *page)])
            records = [self._unpacked(key, name, data) for name, data in zip(page, answers, strict=True)]
            intact = [record for record in records if record is not None]
            size += total_size(intact)
            if max_bytes is not None:
                within(max_bytes, size)
            found[:0] = intact
        return found

    def _unpacked(self, key: bytes, name: bytes, data: bytes | None) -> Record | None:
        """Returns a record; None if it was removed meanwhile or is damaged."""
        if data is None:
            return None
        try:
            return records.unpack(data)
        except Damaged as error:
            self._damage.found((key, name), str(error))
            return None

    @property
    def damaged_responses(self) -> int:
        """See Reader."""
        return self._damage.responses

    def newest_epochs(self) -> dict[str, int]:
        """See Reader."""
        (answer,) = self._read([("ZRANGE", NAMESPACES, 0, -1, "WITHSCORES")])
        found = zip(answer[::2], answer[1::2], strict=True) if answer and isinstance(answer[0], bytes) else answer
        return {name.decode(): min(int(float(score)), LAST_EPOCH) for name, score in found}

    def estimator(self, namespace: str) -> bytes | None:
        """See Reader. If this shard has saved none, returns that of another shard."""
        (answer,) = self._read([("HGETALL", estimators_key(namespace.encode()))])
        states = pairs(answer)
        return states.get(self._shard, next(iter(states.values()), None))

    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """See Reader."""
        for members, digests in self._walk(namespace.encode(), self._read):
            forgotten = []
            keys = [problem_key(digest) for digest in digests]
            abouts = self._read([("HGET", key, ABOUT) for key in keys])
            for digest, key, about in zip(digests, keys, abouts, strict=True):
                if about is None:
                    forgotten.append(digest)
                    continue
                (names,) = self._read([("HKEYS", key)])
                if found := self._records(key, names):
                    yield problem_of(about), found
            self._tidy(members, forgotten, self._read)

    def _read(self, commands: Sequence[Command]) -> list[Any]:
        try:
            try:
                return self._servers.run(commands)
            except TRANSIENT:  # a connection that idled too long, or a server that moved
                return self._servers.run(commands)
        except redis.RedisError as error:
            raise _explain(error) from error

    def close(self) -> None:
        """See Store."""
        self._writer.close()


def _explain(error: Exception) -> StoreError:
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreFull(f"store: the Redis server is full ({error}); nothing of this request is kept")
    if "No space left on device" in str(error):
        return StoreFull(f"store: the disk of the Redis server is full ({error}); nothing of this request is kept")
    return StoreError(f"store: {error}; nothing of this request is kept")
