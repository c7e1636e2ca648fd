"""`histospec snapshot TARGET`: writes the contents of a store or a running service to a file.

The file has the format of recorded rollouts (docs/replay.md), so `histospec replay` reads it, too. Each line is one
problem, read and written one at a time, so memory use does not depend on the size of the history.
"""

import argparse
import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from itertools import chain, groupby, islice
from typing import Any

import grpc

from histospec.server.arguments import whole
from histospec.server.commands import connection
from histospec.server.commands.lines import Stored, encoded, packed, summary
from histospec.server.commands.shards import EVERY, Shards, ShardsError, add_options, failed
from histospec.server.commands.snapshot_target import Folder, SnapshotTarget, ahead, dated_name, snapshot_target
from histospec.server.errors import ConfigError, HistoSpecError
from histospec.server.open_store import open_reader
from histospec.server.output_file import FORCE, is_stdout, keep_apart
from histospec.server.settings import options
from histospec.server.settings.config import StoreConfig
from histospec.server.stores.interface import Problem, Reader
from histospec.server.stores.records import from_message
from histospec.server.stores.sqlite.database import digest_of
from histospec.v1 import draft_pb2 as pb

SOME_EACH = 8
"""If shards have so many problems each on average, one without any has lost them: by chance, 3 in 10,000 have none."""


class SnapshotError(HistoSpecError):
    """A snapshot could not be written completely."""


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Raises HistoSpecError."""
    asked, flags = _arguments(argv)
    target = snapshot_target(asked.target, asked.force)
    if isinstance(target, Folder) and target.name:
        inputs = connection.files({**vars(asked), **flags}, ("config", "store_file", *connection.OPTIONS))
        keep_apart([("TARGET", target.name)], inputs)
    if asked.keep and target.name:
        raise ConfigError(f"--keep: {asked.target} is one file; give a folder or a URL for dated snapshots")
    counts: Counter[str] = Counter()
    with _source(asked, flags, counts) as (problems, damaged, lost):
        name = _write(target, _counted(problems, counts))
        result = summary(counts) if name else "the store is empty, so nothing was written or removed"
        (sys.stderr if is_stdout(asked.target) else sys.stdout).write(f"{name or asked.target}: {result}\n")
        if damaged():
            raise SnapshotError(
                f"at least {damaged()} responses of the store are damaged and left out; {name or 'no file'} has all "
                "others (docs/runbooks.md#histospecstoredamaged)"
            )
    if asked.keep and name:
        _rotate(target, asked.keep, name, lost() if asked.namespace == EVERY else [])
    return 0


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, object]]:
    """Returns the options of the command and those of the store that it opens. Raises ConfigError."""
    description = (
        "Write the contents of a store or a running service to a file, even while in use. Takes all responses of a "
        "store unless --history-responses is given."
    )
    parser = options.parser(StoreConfig, "histospec snapshot", description)
    add_options(parser)
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file to write, .jsonl or .jsonl.gz; - for standard output; or a folder, s3://BUCKET/PREFIX, gs://... or "
        "az://..., where the time becomes its name",
    )
    help_ = f"the shards of a running service, instead of a store: {connection.SERVICE}"
    parser.add_argument("--from", dest="endpoint", metavar="ENDPOINT", default=None, help=help_)
    help_ = "after writing, remove all but the newest N snapshots there"
    parser.add_argument("--keep", metavar="N", type=whole(1), default=None, help=help_)
    parser.add_argument("--force", action="store_true", default=False, help=FORCE)
    given = vars(parser.parse_args(list(argv)))
    flags = {name: given.pop(name) for name in list(given) if name == "config" or name in StoreConfig.model_fields}
    asked = argparse.Namespace(**given)
    if asked.endpoint is not None and flags:
        raise ConfigError(
            f"--{min(flags).replace('_', '-')}: applies to a store that the command opens, but {asked.endpoint} has "
            "its own; omit it"
        )
    remote = [name for name in ("shards", *connection.OPTIONS) if given[name] is not None]
    if asked.endpoint is None and remote:
        raise ConfigError(f"--{remote[0].replace('_', '-')}: needs a running service; name it with --from")
    return asked, flags


@contextmanager
def _source(
    asked: argparse.Namespace, flags: dict[str, object], counts: "Counter[str]"
) -> Iterator[tuple[Iterable[Stored], Callable[[], int], Callable[[], list[str]]]]:
    """Yields the problems to write, a function that returns how many responses are damaged, and `Exported.lost`."""
    if asked.endpoint is None:
        config = options.settle(StoreConfig, flags)
        most = config.history_responses if "history_responses" in config.model_fields_set else None
        with closing(open_reader(config)) as reader:
            yield _newest(_stored(reader, asked.namespace), most, counts), lambda: reader.damaged_responses, list
        return
    with (
        Shards(connection.caller(asked.endpoint, asked), asked.shards) as shards,
        closing(Exported(shards, asked.namespace)) as exported,
    ):
        yield exported, lambda: exported.damaged, exported.lost


def _write(target: SnapshotTarget, problems: Iterator[Stored]) -> str | None:
    """Writes the problems. Returns the full name of the snapshot.

    Returns None, and writes no dated snapshot, if there are no problems: snapshots of a service that lost its volumes
    must not displace older ones.
    """
    first = list(islice(problems, 1))
    if not (target.name or first):
        return None
    name = target.name or dated_name()
    lines = encoded(chain(first, problems))
    target.write(name, packed(lines) if name.endswith(".gz") else lines)
    return target.path(name)


def _rotate(target: SnapshotTarget, keep: int, written: str, lost: Sequence[str]) -> None:
    """Removes older snapshots and prints their names. Raises SnapshotError instead if the new one may be the worse."""
    old = target.surplus(keep, written)
    if old and lost:
        raise SnapshotError(
            f"--keep: {', '.join(lost)} exported no problem while other shards did, so no older snapshot was removed; "
            "if a volume was lost, restore an older snapshot with --merge; if the shard is new, run this again once it "
            "has responses"
        )
    if wrong := ahead(target.names()):
        raise SnapshotError(
            f"--keep: the time of {', '.join(map(target.path, wrong))} is in the future, so no older snapshot was "
            "removed; correct the clock, or rename or remove what a wrong clock has named"
        )
    target.remove(old)
    sys.stdout.writelines(f"{target.path(name)}: removed\n" for name in old)


def _counted(problems: Iterable[Stored], counts: "Counter[str]") -> Iterator[Stored]:
    for stored in problems:
        counts.update(problems=1, responses=len(stored.records), tokens=stored.tokens)
        yield stored


def _stored(reader: Reader, pattern: str) -> Iterator[Stored]:
    """Yields the problems of a store in namespaces that match."""
    reader.complete()
    for namespace in sorted(reader.newest_epochs()):
        if fnmatchcase(namespace, pattern):
            learned = reader.estimator(namespace)
            for problem, records in reader.problems(namespace):
                yield Stored(problem, records, learned)
                learned = None


def _newest(problems: Iterable[Stored], most: int | None, counts: "Counter[str]") -> Iterator[Stored]:
    """Yields the problems with the newest `most` responses of each, None for all; counts those that it leaves out."""
    for stored in problems:
        surplus = max(0, len(stored.records) - most) if most else 0
        counts["left_out"] += surplus
        yield stored._replace(records=stored.records[surplus:])


class Exported:
    """The problems of all shards in namespaces that match, each problem once. Iterable once, then closed.

    Holds one problem and one message of each shard at a time. Raises ShardsError.
    """

    def __init__(self, shards: Shards, pattern: str) -> None:
        self._shards = shards
        self._request = pb.ExportRequest(namespaces=pattern)
        self._calls: dict[str, Any] = {}
        self._held: dict[str, int] = {}  # problems, by shard; of those that have sent all
        self.damaged = 0
        """Damaged responses that the shards omitted; set once the iteration has ended."""

    def __iter__(self) -> Iterator[Stored]:
        shared = False
        for name in self._shards.names:
            if not shared:  # a shared store: one shard exports the responses of all of them
                self._calls[name], start = self._shards.stream(name, self._request)
                shared = start.shared
        return merged([self._problems(name, call) for name, call in self._calls.items()])

    def lost(self) -> list[str]:
        """Returns the shards that sent no problem, if all sent so many that each should have some."""
        if sum(self._held.values()) < SOME_EACH * len(self._held):
            return []
        return [shard for shard, problems in self._held.items() if not problems]

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
        self._held[shard] = problems


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
