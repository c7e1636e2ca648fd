"""The problems in a store, or in all shards of a running service."""

import heapq
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import grpc

from histospec.server.commands.lines import Stored
from histospec.server.commands.shards import Shards, ShardsError, failed
from histospec.server.stores.interface import Problem, Reader, Record
from histospec.server.stores.sqlite.reader import digest_of
from histospec.v1 import draft_pb2 as pb


def held(reader: Reader, pattern: str) -> Iterator[Stored]:
    """What a store holds of namespaces that match."""
    for namespace in sorted(reader.newest_epochs()):
        if fnmatchcase(namespace, pattern):
            learned = reader.estimator(namespace)
            for problem, records in reader.problems(namespace):
                yield Stored(problem, records, learned)
                learned = None


class Exported:
    """What all shards hold of namespaces that match, each problem once. Iterable once, and then closed.

    Holds a problem and a message of each shard at a time. Raises ShardsError.
    """

    def __init__(self, shards: Shards, pattern: str) -> None:
        self._shards = shards
        self._request = pb.ExportRequest(namespaces=pattern)
        self._calls: dict[str, Any] = {}
        self.damaged = 0
        """Responses that the shards found damaged, and left out; once the iteration has ended."""

    def __iter__(self) -> Iterator[Stored]:
        shared = False
        for name in self._shards.names:
            if not shared:  # else one shard exports what all of them have
                self._calls[name], start = self._shards.stream(name, self._request)
                shared = start.shared
        return merged([self._problems(name, call) for name, call in self._calls.items()])

    def close(self) -> None:
        """Ends what is still being exported."""
        for call in self._calls.values():
            call.cancel()

    def _problems(self, shard: str, call: Any) -> Iterator[Stored]:
        """What one shard exports."""
        stored: Stored | None = None
        learned: bytes | None = None
        end: pb.ExportEnd | None = None
        problems = responses = 0
        try:
            for message in call:
                learned = message.estimator or learned
                for part in message.problems:
                    records = [_record(response) for response in part.responses]
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
                    learned = None  # of a namespace without problems
        except grpc.RpcError as error:
            raise failed(shard, "Export", error) from None
        if stored is not None:
            yield stored
        if end is None or (end.problems, end.responses) != (problems, responses):
            raise ShardsError(f"Export on {shard}: {responses} responses came, and not all that were sent; try again")
        self.damaged += end.damaged


def merged(exports: Iterable[Iterator[Stored]]) -> Iterator[Stored]:
    """Several exports as one, each problem once: a problem may have moved from one shard to another and left some."""
    learned: set[str] = set()
    for _, same in groupby(heapq.merge(*exports, key=_order), key=_order):
        for stored in _united(list(same)):
            namespace = stored.problem.namespace
            first = bool(stored.estimator) and namespace not in learned
            if first:
                learned.add(namespace)
            yield stored if first else stored._replace(estimator=None)


def _order(stored: Stored) -> tuple[str, str, bytes]:
    """The order in which shards export, see draft.proto."""
    namespace, prompt, name = stored.problem
    return namespace, name, b"" if name else digest_of(prompt)


def _united(same: list[Stored]) -> Iterator[Stored]:
    """Of one place in the order: usually one problem, but two prompts may have one hash."""
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


def _record(response: pb.Response) -> Record:
    return Record(
        response.tokens,
        response.epoch,
        response.reward if response.HasField("reward") else None,
        response.logprobs,
        response.generated,
        response.seed if response.HasField("seed") else None,
    )
