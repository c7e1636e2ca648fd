"""Reads the problems of a store, or of all shards of a running service."""

import heapq
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import grpc

from histospec.server.commands.lines import Stored
from histospec.server.commands.shards import Shards, ShardsError, failed
from histospec.server.stores.interface import Problem, Reader
from histospec.server.stores.records import from_message
from histospec.server.stores.sqlite.database import digest_of
from histospec.v1 import draft_pb2 as pb


def held(reader: Reader, pattern: str) -> Iterator[Stored]:
    """Yields the problems of a store in namespaces that match."""
    reader.complete()
    for namespace in sorted(reader.newest_epochs()):
        if fnmatchcase(namespace, pattern):
            learned = reader.estimator(namespace)
            for problem, records in reader.problems(namespace):
                yield Stored(problem, records, learned)
                learned = None


class Exported:
    """The problems of all shards in namespaces that match, each problem once. Iterable once, then closed.

    Holds one problem and one message of each shard at a time. Raises ShardsError.
    """

    def __init__(self, shards: Shards, pattern: str) -> None:
        self._shards = shards
        self._request = pb.ExportRequest(namespaces=pattern)
        self._calls: dict[str, Any] = {}
        self.damaged = 0
        """Damaged responses that the shards omitted; set once the iteration has ended."""

    def __iter__(self) -> Iterator[Stored]:
        shared = False
        for name in self._shards.names:
            if not shared:  # a shared store: one shard exports the responses of all of them
                self._calls[name], start = self._shards.stream(name, self._request)
                shared = start.shared
        return merged([self._problems(name, call) for name, call in self._calls.items()])

    def close(self) -> None:
        """Cancels exports that are still running."""
        for call in self._calls.values():
            call.cancel()

    def _problems(self, shard: str, call: Any) -> Iterator[Stored]:
        """Yields the problems that one shard exports."""
        stored: Stored | None = None
        learned: bytes | None = None
        end: pb.ExportEnd | None = None
        problems = responses = 0
        try:
            for message in call:
                learned = message.estimator or learned
                for part in message.problems:
                    records = [from_message(response) for response in part.responses]
                    responses += len(records)
                    if part.continued and stored is not None:
                        stored.records.extend(records)
                        continue
                    if stored is not None:
                        yield stored
                    problems += 1
                    problem = Problem(message.namespace, part.prompt, part.problem)
                    stored, learned = Stored(problem, records, learned), None
                if not message.problems and message.HasField("end"):
                    end = message.end
                elif not message.problems:
                    learned = None  # it belongs to a namespace without problems
        except grpc.RpcError as error:
            raise failed(shard, "Export", error) from None
        if stored is not None:
            yield stored
        if end is None or (end.problems, end.responses) != (problems, responses):
            raise ShardsError(f"Export on {shard}: {responses} responses arrived, fewer than the shard sent; try again")
        self.damaged += end.damaged


def merged(exports: Iterable[Iterator[Stored]]) -> Iterator[Stored]:
    """Merges sorted exports, each problem once: a problem that moved between shards may have responses on both."""
    learned: set[str] = set()
    for _, same in groupby(heapq.merge(*exports, key=_order), key=_order):
        for stored in _united(list(same)):
            namespace = stored.problem.namespace
            first = bool(stored.estimator) and namespace not in learned
            if first:
                learned.add(namespace)
            yield stored if first else stored._replace(estimator=None)


def _order(stored: Stored) -> tuple[str, str, bytes]:
    """Returns the sort key of exports, see draft.proto."""
    namespace, prompt, name = stored.problem
    return namespace, name, b"" if name else digest_of(prompt)


def _united(same: list[Stored]) -> Iterator[Stored]:
    """Unites the problems at one place in the order: usually one problem, but two prompts may share a hash."""
    found: dict[tuple[str, bytes], Stored] = {}
    for stored in same:
        problem = stored.problem
        key = problem.name, b"" if problem.name else problem.prompt
        if (other := found.get(key)) is None:
            found[key] = stored
            continue
        records = sorted([*other.records, *stored.records], key=lambda record: record.epoch)
        found[key] = Stored(other.problem, records, other.estimator or stored.estimator)
    yield from found.values()
