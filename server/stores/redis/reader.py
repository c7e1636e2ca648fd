"""Reads the responses in Redis. The reader finds a problem by its digest, and compares its tokens at every read."""

from collections.abc import Iterator, Sequence
from typing import Any

import redis

from histospec.server.errors import Damaged
from histospec.server.stores import records
from histospec.server.stores.interface import LAST_EPOCH, Problem, Reader, Record, total_size, within
from histospec.server.stores.redis.generations import Generations
from histospec.server.stores.redis.keys import (
    ABOUT,
    GENERATIONS,
    NAMESPACES,
    digest_of,
    estimators_key,
    pairs,
    problem_key,
    response_names,
    same,
)
from histospec.server.stores.redis.lists import Lists, tidy, walk
from histospec.server.stores.redis.servers import TRANSIENT, Command, Servers, explain, is_about_its_key

READ_PAGE = 64  # responses per round trip


class RedisReader(Reader):
    """Reads the newest `history_responses` of each problem. `shard` names the server whose estimators are preferred."""

    def __init__(self, servers: Servers, history_responses: int, shard: str) -> None:
        self._servers = servers
        self._history_responses = history_responses
        self._shard = shard.encode()
        self._damage = records.DamageCount()
        self._lists = Lists(servers, self._damage)
        self._generations = Generations(servers)

    def complete(self) -> None:
        """See Store. Lists problems whose list has lost them, for example because Redis evicted it."""
        try:
            try:
                self._lists.complete()
            except TRANSIENT:  # a connection that idled too long, or a server that moved
                self._lists.complete()
        except redis.RedisError as error:
            raise explain(error) from error

    def history(self, problem: Problem, limit: int = 0, max_bytes: int | None = None) -> list[Record]:
        """See Reader."""
        key = problem_key(digest_of(problem))
        about, names = self._read([("HGET", key, ABOUT), ("HKEYS", key)], each=True)
        if (held := self._lists.problem(key, about)) is None or not same(held, problem):
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
        answer, generations = self._read([("ZRANGE", NAMESPACES, 0, -1, "WITHSCORES"), ("HGETALL", GENERATIONS)])
        self._generations.saw(pairs(generations))
        found = zip(answer[::2], answer[1::2], strict=True) if answer and isinstance(answer[0], bytes) else answer
        return {name.decode(): min(int(float(score)), LAST_EPOCH) for name, score in found}

    def estimator(self, namespace: str) -> bytes | None:
        """See Reader. If this shard has saved none, returns that of another shard."""
        (answer,) = self._read([("HGETALL", estimators_key(namespace.encode()))])
        states = pairs(answer)
        return states.get(self._shard, next(iter(states.values()), None))

    def problems(self, namespace: str) -> Iterator[tuple[Problem, list[Record]]]:
        """See Reader."""
        for members, digests in walk(namespace.encode(), self._read):
            forgotten = []
            keys = [problem_key(digest) for digest in digests]
            abouts = self._read([("HGET", key, ABOUT) for key in keys], each=True)
            for digest, key, about in zip(digests, keys, abouts, strict=True):
                if about is None:
                    forgotten.append(digest)
                if (problem := self._lists.problem(key, about)) is None:
                    continue
                (names,) = self._read([("HKEYS", key)])
                if found := self._records(key, names):
                    yield problem, found
            tidy(members, forgotten, self._read)

    def _read(self, commands: Sequence[Command], each: bool = False) -> list[Any]:
        """Returns the answers; with `each`, an error about the contents of one key is its answer."""
        answers: list[Any] = []
        for _ in range(2):  # a connection may have idled too long, or a server moved
            answers = self._tried(commands)
            if not any(isinstance(answer, TRANSIENT) for answer in answers):
                break
        for answer in answers:
            if isinstance(answer, Exception) and not (each and is_about_its_key(answer)):
                raise explain(answer) from answer
        return answers

    def _tried(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return self._servers.each(commands)
        except redis.RedisError as error:
            return [error]
