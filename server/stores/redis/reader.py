"""Reads the responses in Redis. The reader finds a problem by its digest, and compares its tokens at every read."""

from collections.abc import Iterable, Iterator, Sequence
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

# The limits of one round trip: responses, and their bytes unless the first one alone has more.
READ_PAGE = 256
PAGE_BYTES = 4 << 20

READ = """
local found, size = {}, 0
for i = 2, #ARGV do
    local value = redis.call('HGET', KEYS[1], ARGV[i])
    size = size + (value and #value or 0)
    if i > 2 and size > tonumber(ARGV[1]) then break end
    found[i - 1] = value
end
return found
"""
"""Returns the values of the first fields, nil for those that are gone. Arguments: the most bytes; then names."""


class RedisReader(Reader):
    """Reads the newest `history_responses` of each problem; 0 for all. `shard`'s estimators are preferred."""

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
        return self._united(self._pages(*self._fields(problem), limit), max_bytes)

    def pages(self, problem: Problem) -> Iterator[list[Record]]:
        """See Reader."""
        return self._pages(*self._fields(problem))

    def _fields(self, problem: Problem) -> tuple[bytes, list[bytes]]:
        """Returns the key of a problem and the names of its responses, oldest first; no names if it is not there."""
        key = problem_key(digest_of(problem))
        about, names = self._read([("HGET", key, ABOUT), ("HKEYS", key)], each=True)
        if (held := self._lists.problem(key, about)) is None or not same(held, problem):
            return key, []
        return key, response_names(names)

    def _pages(self, key: bytes, names: Sequence[bytes], limit: int = 0) -> Iterator[list[Record]]:
        """Yields the newest responses: newest page first, within a page oldest first, without damaged ones."""
        most = self._history_responses
        newest = names[-min(limit or most, most or limit) :]
        while newest:
            read, page = self._page(key, newest[: -READ_PAGE - 1 : -1])
            newest = newest[:-read]
            yield page

    def _page(self, key: bytes, names: Sequence[bytes]) -> tuple[int, list[Record]]:
        """Returns how many of the names, which come newest first, it has read, and their responses, oldest first."""
        (answers,) = self._read([("EVAL", READ, 1, key, PAGE_BYTES, *names)])
        records = [self._unpacked(key, name, data) for name, data in zip(names, answers, strict=False)]
        return len(records), [record for record in reversed(records) if record is not None]

    @staticmethod
    def _united(pages: Iterable[list[Record]], max_bytes: int | None = None) -> list[Record]:
        """Returns the responses of all pages, oldest first. Reads no page beyond `max_bytes`, but raises."""
        found: list[list[Record]] = []
        size = 0
        for page in pages:
            size += total_size(page)
            if max_bytes is not None:
                within(max_bytes, size)
            found.append(page)
        return [record for page in reversed(found) for record in page]

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
                if found := self._united(self._pages(key, response_names(names))):
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
