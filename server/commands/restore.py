"""`histospec restore SOURCE`: loads a snapshot into a store, or into the shards of a running service."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from histospec.replay.recordings import RecordingError, is_regular, opened
from histospec.server.commands import connection
from histospec.server.commands.imported import Importing, held
from histospec.server.commands.into_store import IntoStore
from histospec.server.commands.lines import Stored, decoded, namespaces
from histospec.server.commands.places import place
from histospec.server.commands.shards import Shards, ShardsError
from histospec.server.commands.snapshot import SnapshotError, parser_of, split, summary
from histospec.server.errors import ConfigError, StoreError
from histospec.server.open_store import open_store
from histospec.server.settings import options
from histospec.server.settings.config import StoreConfig


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Raises HistoSpecError."""
    parser = parser_of("restore", "Load a snapshot into a store or a running service.")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a snapshot of `histospec snapshot`: a file, - for standard input, or a URL; from a folder or "
        "s3://BUCKET/PREFIX, the newest one",
    )
    help_ = f"the shards of a running service, instead of a store: {connection.SERVICE}"
    parser.add_argument("--to", dest="endpoint", metavar="ENDPOINT", help=help_)
    parser.add_argument("--merge", action="store_true", help="add missing responses to namespaces that exist")
    asked, flags = split(parser, argv)
    counts: Counter[str] = Counter()
    with _lines(asked.source, asked.namespace) as (name, named, problems):
        try:
            with _target(asked, flags) as (target, there):
                _refuse(there & named, asked.merge)
                _restore(target, problems, there, asked.merge, counts)
        except (StoreError, ShardsError) as error:
            raise SnapshotError(f"{error}; earlier ones are restored: run again with --merge to add the rest") from None
    sys.stdout.write(f"{name}: {summary(counts)}\n")
    return 0


@contextmanager
def _lines(source: str, pattern: str) -> Iterator[tuple[str, set[str], Iterator[Stored]]]:
    """Yields the name of a snapshot, its namespaces (none if it can be read only once), and its problems.

    Checks the whole file first.
    """
    where = place(source)
    if where is None:
        with opened(source) as file:
            named = set()
            if is_regular(file):
                named = namespaces(file, pattern)
                file.seek(0)
            yield source, named, decoded(file, pattern)
        return
    folder, name = where
    name = name or folder.newest()
    with folder.opened(name) as file:
        named = namespaces(file, pattern)
    with folder.opened(name) as file:
        yield folder.path(name), named, decoded(file, pattern)


@contextmanager
def _target(asked: argparse.Namespace, flags: dict[str, object]) -> Iterator[tuple[IntoStore | Importing, set[str]]]:
    """Yields the target of the problems, and the namespaces that it already has."""
    if asked.endpoint is None:
        with closing(open_store(options.settle(StoreConfig, flags), "")) as store:
            target = IntoStore(store)
            yield target, target.held
        return
    with Shards(connection.caller(asked.endpoint, asked), asked.shards) as shards:
        there = held(shards, asked.namespace)
        with Importing(shards) as importing:
            yield importing, there


def _restore(
    target: IntoStore | Importing, problems: Iterator[Stored], there: set[str], merge: bool, counts: "Counter[str]"
) -> None:
    """Adds the problems. With `merge`, existing namespaces get only missing responses."""
    try:
        for stored in problems:
            _refuse(there & {stored.problem.namespace}, merge)
            target.add(stored)
            counts["problems"] += 1
    except (ConfigError, RecordingError) as error:  # in a source that can be read only once
        target.land()
        if not counts:
            raise
        told = summary(_added(counts, target))
        raise type(error)(f"{error} (restored before it: {told}; run again with --merge to add the rest)") from None
    target.land()
    _added(counts, target)


def _added(counts: "Counter[str]", target: IntoStore | Importing) -> "Counter[str]":
    counts.update(responses=target.responses, tokens=target.tokens)
    return counts


def _refuse(held: set[str], merge: bool) -> None:
    if held and not merge:
        raise ConfigError(
            f"the store already has namespace {min(held)!r}: drop it, exclude it with --namespace, or give --merge to "
            "add missing responses"
        )
