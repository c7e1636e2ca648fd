"""Stores with all kinds of contents, and comparisons of them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from histospec.protocol.alternatives import Place, pack
from histospec.server.stores.interface import HISTORY_RESPONSES, Problem, Record, ResponseBatch, Store
from histospec.server.stores.redis.location import Location
from histospec.server.stores.redis.servers import Servers
from histospec.server.stores.redis.store import RedisStore
from histospec.server.stores.sqlite.reader import SQLiteReader
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.redis_processes import RedisCluster, RedisProcess


def tokens(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def logprobs(count: int) -> bytes:
    """Every kind of float32 that there is."""
    some = np.random.default_rng(count).integers(0, 2**32, count, np.uint64).astype("<u4").view("<f4")
    special = np.array([-0.0, 1e-45, -np.inf, np.finfo("f4").max, -0.1], "<f4")
    return np.resize(np.concatenate([special, some[~np.isnan(some)]]), count).tobytes()


OTHERS = pack([None, Place(0.5, [(2**24 - 1, 0.3), (0, 0.05)]), None, Place(0.2, [(7, 0.6)])])


BATCHES = [
    ResponseBatch(Problem("run", tokens(1, 2)), [Record(tokens(5, 6, 7), 0, 0.1), Record(tokens(5, 6, 7), 0, 0.1)]),
    ResponseBatch(
        Problem("run", tokens(1, 2)), [Record(tokens(*range(300)), 2**31, -1e-300, logprobs(300), seed=-(2**63))]
    ),
    ResponseBatch(Problem("run", tokens(1, 2), "a name ❤"), [Record(tokens(9), 3, None, b"", b"\0")]),
    ResponseBatch(
        Problem("run", tokens(3), "turns"),
        [
            Record(tokens(1, 2, 3, 2**31 - 1), 1, 2.0, logprobs(4), bytes([1, 0, 0, 1]), 7, OTHERS),
            Record(tokens(8, 9), 1, seed=0),
        ],
    ),
    ResponseBatch(Problem("other ❤", tokens(1, 2), "turns"), [Record(tokens(4), 1)]),
    ResponseBatch(Problem("empty", tokens(1)), [Record(tokens(4), 1)]),
]


STATE = os.urandom(1000)


def fill(store: Store) -> None:
    for some in BATCHES:
        store.append(some).result()
    store.rewind("empty", 0).result()
    store.save_estimator("run", STATE).result()


def content(store: Store) -> tuple[dict[Problem, list[Record]], dict[str, bytes]]:
    problems = {p: records for namespace in store.newest_epochs() for p, records in store.problems(namespace)}
    return problems, store.estimators()


def restorable(store: Store) -> dict[Problem, list[Record]]:
    """All responses of a store as a restore writes them: a message carries rewards as float32."""

    def rounded(record: Record) -> Record:
        return record._replace(reward=None if record.reward is None else float(np.float32(record.reward)))

    return {problem: list(map(rounded, records)) for problem, records in content(store)[0].items()}


def on_disk(tmp_path: Path, name: str = "data", history_responses: int = HISTORY_RESPONSES) -> SQLiteStore:
    return SQLiteStore(tmp_path / name, 8, history_responses=history_responses)


def large(tmp_path: Path, name: str = "data") -> Path:
    """The directory of a store whose snapshot takes seconds."""
    store = on_disk(tmp_path, name)
    for future in [
        store.append(ResponseBatch(Problem("run", tokens(n)), [Record(tokens(*range(n, n + 5000)), 0)]))
        for n in range(3000)
    ]:
        future.result()
    store.close()
    return tmp_path / name


def in_redis(server: RedisProcess | RedisCluster, history_responses: int = HISTORY_RESPONSES) -> RedisStore:
    where = Servers(lambda: Location.parse(server.url))
    return RedisStore(where, 8, "shard-0", history_responses=history_responses)


def rows(store: SQLiteStore, query: str) -> list[Any]:
    """Returns the rows of a query after all writes before it."""
    found: list[Any] = store.submit(lambda connection: connection.execute(query).fetchall()).result()
    return found


def to_load(store: SQLiteReader) -> Iterator[ResponseBatch]:
    """What a server loads of a store: each problem once, with all of its responses, in the order of loading."""
    seen = set()
    for problem in (problem for page in store.wanted_first() for problem in page):
        if problem.identity not in seen:
            seen.add(problem.identity)
            records = [record for page in reversed(list(store.pages(problem))) for record in page]
            if records:
                yield ResponseBatch(problem, records)
