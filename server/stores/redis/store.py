"""The store in Redis or Valkey, alone or as a Cluster, which all shards share.

`keys` describes the layout. The store finds a problem by its digest, and also compares the tokens before the first
write and at every read. Every write lists its problem and its namespace again before it is acknowledged, because Redis
may have lost them. What needs all problems of a namespace first looks for unlisted ones (`complete`). The store
chooses the name of a response's field once: after a lost answer, writing the response again changes nothing.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, groupby, repeat
from typing import Any

import redis
import structlog

from histospec.server.errors import StoreError
from histospec.server.stores import records
from histospec.server.stores.group_commit import MAX_BACKLOG, GroupCommit, Work
from histospec.server.stores.interface import HISTORY_RESPONSES, ResponseBatch, Store, StoreSize
from histospec.server.stores.redis.keys import (
    GENERATIONS,
    GONE,
    NAMESPACES,
    OTHER,
    PUT,
    about_of,
    compared_size,
    digest_of,
    epoch_of,
    estimators_key,
    generation,
    problem_key,
    problems_key,
    response_fields,
    response_names,
)
from histospec.server.stores.redis.lists import PAGE, tidy, walk
from histospec.server.stores.redis.reader import RedisReader
from histospec.server.stores.redis.servers import TRANSIENT, Command, Memory, Servers, explain, is_about_its_key

log = structlog.get_logger()

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
        self.compared = compared_size(problem)
        self.epochs = {record.epoch for record in batch.records}
        self.fields = response_fields(record.epoch for record in batch.records)
        self.values = [records.pack(record) for record in batch.records]

    def put(self, retention: int, known: bool) -> Command:
        """Returns the command that adds the responses. `known`: the hash is that of this problem, if it exists."""
        pairs_ = (part for pair in zip(self.fields, self.values, strict=True) for part in pair)
        return ("EVAL", PUT, 1, self.key, b"" if known else self.about, self.compared, retention, *pairs_)


class RedisStore(RedisReader, Store):
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
        super().__init__(servers, history_responses, shard)
        self._retention = int(1000 * retention)  # milliseconds
        self._patience = patience
        self._memory = Memory(servers.memory)
        self._history_epochs = history_epochs
        # Only the names of all responses tell which are the oldest, so old ones are not removed with every write.
        self._slack = history_responses // 8
        # Only the writer's thread uses these.
        # By digest: known epochs. The problems are those whose prompts were compared.
        self._epochs: OrderedDict[bytes, set[int]] = OrderedDict()
        self._away = False
        self._writer: GroupCommit[_Append | partial[Any]] = GroupCommit(self._write, servers.close, max_backlog)
        self._completing: GroupCommit[_Append | partial[Any]] = GroupCommit(self._complete, lambda: None)
        self._closing = threading.Event()

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
    def hazard(self) -> str:
        """See Store."""
        policy = self._memory.evicts
        return f"maxmemory-policy of Redis is {policy}; set noeviction" if policy else ""

    @property
    def outage(self) -> str:
        """See Store. Returns what was last seen; asks Redis at most every ten seconds."""
        self._memory.look()
        return self._memory.outage

    def append(self, batch: ResponseBatch) -> "Future[int]":
        """See Store."""
        return self._writer.submit(_Append(batch), batch.waiting_size)

    def save_estimator(self, namespace: str, state: bytes) -> "Future[None]":
        """See Store. Saves nothing if another shard has dropped the namespace since `replaced` was called."""
        return self._writer.submit(partial(self._save, namespace.encode(), state), len(state))

    def drop(self, namespace: str) -> "Future[int]":
        """See Store."""
        return self._completing.submit(partial(self._drop, namespace.encode()), 0)

    def rewind(self, namespace: str, epoch: int) -> "Future[int]":
        """See Store."""
        return self._completing.submit(partial(self._rewind, namespace.encode(), epoch), 0)

    def _complete(self, group: list[Work[Any]]) -> None:
        """Looks for unlisted problems once for all drops and rewinds that wait, and passes these on to the writer.

        Writes do not wait for it. Looks for half of the time at most.
        """
        started = time.monotonic()

        def look(works: list[Work[Any]]) -> list[None]:
            self._lists.complete()
            return [None] * len(works)

        def pass_on(work: Work[Any], _: None) -> None:
            self._writer.again(work, work.what)

        self._patiently(look, group, pass_on)
        self._closing.wait(time.monotonic() - started)

    def _write(self, group: list[Work[Any]]) -> None:
        """Writes the group in order; sends neighbouring appends together."""
        for kind, some in groupby(group, key=lambda work: type(work.what)):
            works = list(some)
            if kind is _Append:
                self._patiently(self._append, works, self._writer.settle)
            else:
                self._patiently(self._run, works, self._writer.settle)

    def _patiently(
        self,
        run: Callable[[list[Work[Any]]], list[Any]],
        works: list[Work[Any]],
        done: Callable[[Work[Any], Any], None],
    ) -> None:
        """Calls `done` with the results of `run`, or answers with errors; runs those again that may still succeed."""
        until = time.monotonic() + (0 if self._away else self._patience)
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                results = run(works)
            except redis.RedisError as error:
                results = [error] * len(works)
            again = []
            for work, result in zip(works, results, strict=True):
                if isinstance(result, TRANSIENT):
                    again.append((work, result))
                elif isinstance(result, Exception):
                    self._writer.fail(work, result if isinstance(result, StoreError) else explain(result))
                else:
                    done(work, result)
            if not again:
                break
            works = [work for work, _ in again]
            if time.monotonic() >= until:
                reason = again[0][1]
                if not self._away:
                    log.warning("the store is away; responses are refused until it is back", reason=str(reason))
                self._away = True
                for work in works:
                    self._writer.fail(work, explain(reason))
                return
            time.sleep(pause)
        if self._away:
            log.info("the store is back")
        self._away = False

    def _run(self, works: list[Work[partial[Any]]]) -> list[Any]:
        """Runs the works one after the other. Returns the result of each, or its error."""
        results: list[Any] = []
        for work in works:
            try:
                results.append(work.what())
            except redis.RedisError as error:  # noqa: PERF203 - the others go on
                results.append(error)
        return results

    def _append(self, group: list[Work[_Append]]) -> list[Exception | int]:
        """Writes batches, and then lists them. Returns an error for each that was not written.

        For the others, returns how many of its responses are too old to keep.

        A drop by another shard deletes problems from their lists before it looks whether they are back. So a problem
        that is listed after its write stays listed if it was not deleted.
        """
        works = [work.what for work in group]
        sizes = self._put(works)
        written = [work for work, size in zip(works, sizes, strict=True) if not isinstance(size, Exception)]
        unlisted = self._list(written)
        if any(map(is_about_its_key, unlisted.values())):
            self._lists.complete()  # replaces keys of another type
            unlisted = self._list(written)
        if unlisted:
            self._servers.run([("HDEL", work.key, *work.fields) for work in written if work in unlisted])
        kept = {work: size for work, size in zip(works, sizes, strict=True) if work in written and work not in unlisted}
        gone: Mapping[bytes, set[bytes]] = {}
        with suppress(redis.RedisError):  # the responses are stored, and the next write tries again
            gone = self._trim(kept)
        return [
            size
            if isinstance(size, Exception)
            else unlisted.get(work) or len(gone.get(work.digest, set()).intersection(work.fields))
            for work, size in zip(works, sizes, strict=True)
        ]

    def _put(self, works: Sequence[_Append]) -> list[int | Exception]:
        """Adds the responses to the hashes. Returns for each work how many responses its hash has, or an error."""
        found = self._servers.each([work.put(self._retention, work.digest in self._epochs) for work in works], True)
        if gone := [number for number, answer in enumerate(found) if answer == GONE]:
            again = self._servers.each([works[number].put(self._retention, known=False) for number in gone], True)
            for number, answer in zip(gone, again, strict=True):
                found[number] = answer
        return [_refusal(work.key, answer) or answer for work, answer in zip(works, found, strict=True)]

    def _list(self, works: Sequence[_Append]) -> dict[_Append, Exception]:
        """Lists problems and their namespaces. Returns the works for which that failed."""
        if not works:
            return {}
        newest: dict[bytes, int] = {}
        lists: dict[bytes, list[_Append]] = {}
        for work in works:
            newest[work.namespace] = max(newest.get(work.namespace, 0), *work.epochs)
            lists.setdefault(problems_key(work.namespace, work.digest), []).append(work)
        commands: list[Command] = [("SADD", key, *{work.digest for work in some}) for key, some in lists.items()]
        commands += [("ZADD", NAMESPACES, "GT", epoch, namespace) for namespace, epoch in newest.items()]
        commands += [("HSETNX", GENERATIONS, namespace, generation()) for namespace in newest]
        commands += [("HGET", GENERATIONS, namespace) for namespace in newest]
        answers = self._servers.each(commands, True)
        failed: dict[_Append, Exception] = {}
        for (_, some), answer in zip(lists.items(), answers, strict=False):
            if isinstance(answer, Exception):
                failed |= dict.fromkeys(some, answer)
        for number, namespace in enumerate(newest):
            of_namespace = answers[len(lists) + number :: len(newest)]
            if error := next((answer for answer in of_namespace if isinstance(answer, Exception)), None):
                failed |= {work: error for work in works if work.namespace == namespace}
            elif of_namespace[-1] is not None:
                self._generations.saw({namespace: of_namespace[-1]})
        return failed

    def _trim(self, sizes: dict[_Append, Any]) -> dict[bytes, set[bytes]]:
        """Deletes what the problems may no longer keep. Returns the fields of these responses by digest."""
        most = self._history_responses + self._slack
        full = {work.digest for work, size in sizes.items() if size > most}
        fresh = {
            work.digest: work.key
            for work in sizes
            if work.digest in full or not work.epochs <= self._epochs.get(work.digest, set())
        }
        if fresh:
            names = self._servers.run([("HKEYS", key) for key in fresh.values()])
            return self._slide(dict(zip(fresh, names, strict=True)))
        return {}

    def _save(self, namespace: bytes, state: bytes) -> None:
        if self._generations.is_replaced(namespace):
            return
        listed: Command = ("ZADD", NAMESPACES, "GT", 0, namespace)
        named: Command = ("HSETNX", GENERATIONS, namespace, generation())
        self._servers.run([("HSET", estimators_key(namespace), self._shard, state), listed, named], True)

    def _slide(self, fields: dict[bytes, list[bytes]]) -> dict[bytes, set[bytes]]:
        """Keeps only the newest epochs of these problems, by digest, and of these the newest responses.

        Returns the fields of the others, by digest.
        """
        deletions: list[Command] = []
        gone: dict[bytes, set[bytes]] = {}
        for digest, answer in fields.items():
            names = response_names(answer)
            kept = set(sorted({epoch_of(name) for name in names})[-self._history_epochs :])
            self._epochs[digest] = kept
            self._epochs.move_to_end(digest)
            stay = [name for name in names if epoch_of(name) in kept]
            if len(stay) > self._history_responses + self._slack:
                stay = stay[-self._history_responses :]
            if old := names[: len(names) - len(stay)]:  # the names sort by epoch, then arrival
                gone[digest] = set(old)
                deletions += [
                    ("HDEL", problem_key(digest), *old[start : start + PAGE]) for start in range(0, len(old), PAGE)
                ]
        while len(self._epochs) > KNOWN_PROBLEMS:
            self._epochs.popitem(last=False)
        if deletions:
            self._servers.run(deletions)
        return gone

    def _drop(self, namespace: bytes) -> int:
        (listed,) = self._servers.run([("ZREM", NAMESPACES, namespace)])
        dropped = 0
        for members, digests in walk(namespace, self._servers.run):
            keys = [problem_key(digest) for digest in digests]
            sizes = self._servers.each([("HLEN", key) for key in keys])
            self._servers.run([("UNLINK", key) for key in keys], True)
            dropped += sum(max(0, size - 1) for size in sizes if isinstance(size, int))
            tidy(members, digests, self._servers.run)
        self._servers.run([("UNLINK", estimators_key(namespace))], True)
        if listed or dropped:
            self._renew(namespace, 1)
        return dropped

    def _rewind(self, namespace: bytes, epoch: int) -> int:
        forgotten = 0
        for members, digests in walk(namespace, self._servers.run):
            keys = [problem_key(digest) for digest in digests]
            answers = self._servers.each([("HKEYS", key) for key in keys])
            names = [response_names(answer) if isinstance(answer, list) else [] for answer in answers]
            tidy(members, [d for d, some in zip(digests, answers, strict=True) if some == []], self._servers.run)
            newer = [[name for name in some if epoch_of(name) > epoch] for some in names]
            deletions: list[Command] = [("HDEL", key, *old) for key, old in zip(keys, newer, strict=True) if old]
            if deletions:
                forgotten += sum(self._servers.run(deletions, True))
        self._servers.run([("ZADD", NAMESPACES, "XX", "LT", epoch, namespace)], True)
        if forgotten:
            self._renew(namespace, 0)
        return forgotten

    def _renew(self, namespace: bytes, drops: int) -> None:
        self._epochs.clear()
        self._generations.renew(namespace, drops)

    def replaced(self) -> dict[str, bool]:
        """See Store."""
        return self._generations.replaced(self._read)

    def close(self) -> None:
        """See Store."""
        self._closing.set()
        self._completing.close()
        self._writer.close()


def _refusal(key: bytes, answer: Any) -> StoreError | None:
    """Returns why PUT has added nothing to a key; None if it has, or if the command failed for another reason."""
    if answer == OTHER:
        return StoreError("store: another problem has the same digest; the request is refused")
    if isinstance(answer, Exception) and is_about_its_key(answer):
        return StoreError(
            f"store: {key.decode()} in Redis is no hash, so another program wrote to it; delete it; the request "
            "is refused"
        )
    return None
