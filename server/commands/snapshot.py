"""`histospec snapshot TARGET`: writes the contents of a store or a running service to a file.

The file has the format of recorded rollouts (docs/replay.md), so `histospec replay` reads it, too. Each line is one
problem, read and written one at a time, so memory use does not depend on the size of the history.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice

from histospec.server.arguments import whole
from histospec.server.commands import connection
from histospec.server.commands.exported import Exported, held
from histospec.server.commands.lines import Stored, encoded, packed
from histospec.server.commands.place import Place, now
from histospec.server.commands.places import place
from histospec.server.commands.shards import Shards
from histospec.server.errors import ConfigError, HistoSpecError
from histospec.server.open_store import open_reader
from histospec.server.output_file import FORCE, is_stdout, written
from histospec.server.settings import options
from histospec.server.settings.config import StoreConfig

MOST_SHARDS = 10_000


class SnapshotError(HistoSpecError):
    """A snapshot could not be written, or could not be restored completely."""


def main(argv: Sequence[str]) -> int:
    """Runs the command with these arguments. Raises HistoSpecError."""
    parser = parser_of("snapshot", "Write the contents of a store or a running service to a file, even while in use.")
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file to write, .jsonl or .jsonl.gz; - for standard output; or a folder, s3://BUCKET/PREFIX, gs://... or "
        "az://..., where the time becomes its name",
    )
    help_ = f"the shards of a running service, instead of a store: {connection.SERVICE}"
    parser.add_argument("--from", dest="endpoint", metavar="ENDPOINT", help=help_)
    parser.add_argument(
        "--keep", metavar="N", type=whole(1), help="after writing, remove all but the newest N snapshots there"
    )
    parser.add_argument("--force", action="store_true", help=FORCE)
    asked, flags = split(parser, argv)
    where = place(asked.target)
    if asked.keep and (where is None or where[1]):
        raise ConfigError(f"--keep: {asked.target} is one file; give a folder or a URL for dated snapshots")
    counts: Counter[str] = Counter()
    with _source(asked, flags) as (problems, damaged):
        name = _write(asked, where, _counted(problems, counts))
        told = summary(counts) if name else "the store is empty, so nothing was written or removed"
        (sys.stderr if is_stdout(asked.target) else sys.stdout).write(f"{name or asked.target}: {told}\n")
        if damaged():
            raise SnapshotError(
                f"at least {damaged()} responses of the store are damaged and left out; {name or 'no file'} has all "
                "others (docs/runbooks.md#histospecstoredamaged)"
            )
    if asked.keep and where and name:
        removed = where[0].keep(asked.keep)
        sys.stdout.writelines(f"{where[0].path(old)}: removed\n" for old in removed)
    return 0


def parser_of(word: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of both `snapshot` and `restore`."""
    parser = options.parser(StoreConfig, f"histospec {word}", description)
    parser.add_argument("--namespace", metavar="PATTERN", help="only namespaces that match, such as 'run-*'")
    parser.add_argument(
        "--shards", metavar="N", type=whole(1, MOST_SHARDS), help="number of shards; fail unless all of them answer"
    )
    connection.add_options(parser)
    return parser


def split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, object]]:
    """Splits the options of the command from those of the store that it opens. Raises ConfigError if both are given."""
    given = vars(parser.parse_args(list(argv)))
    flags = {name: value for name, value in given.items() if name == "config" or name in StoreConfig.model_fields}
    usual = {"endpoint": None, "namespace": "*", "keep": None, "force": False, "merge": False, "shards": None}
    asked = argparse.Namespace(**{**usual, **{name: value for name, value in given.items() if name not in flags}})
    if asked.endpoint is not None and flags:
        raise ConfigError(
            f"--{min(flags).replace('_', '-')}: applies to a store that the command opens, but {asked.endpoint} has "
            "its own; omit it"
        )
    remote = [name for name in ("shards", *connection.OPTIONS) if getattr(asked, name, None) is not None]
    if asked.endpoint is None and remote:
        raise ConfigError(f"--{remote[0].replace('_', '-')}: needs a running service; name it with --from or --to")
    return asked, flags


def summary(counts: "Counter[str]") -> str:
    """Returns the counts in words."""
    return ", ".join(f"{counts[what]} {what}" for what in ("problems", "responses", "tokens"))


@contextmanager
def _source(
    asked: argparse.Namespace, flags: dict[str, object]
) -> Iterator[tuple[Iterable[Stored], Callable[[], int]]]:
    """Yields the problems to write, and a function that returns how many damaged responses were found."""
    if asked.endpoint is None:
        with closing(open_reader(options.settle(StoreConfig, flags))) as reader:
            yield held(reader, asked.namespace), lambda: reader.damaged_responses
        return
    with (
        Shards(connection.caller(asked.endpoint, asked), asked.shards) as shards,
        closing(Exported(shards, asked.namespace)) as exported,
    ):
        yield exported, lambda: exported.damaged


def _write(asked: argparse.Namespace, where: tuple[Place, str] | None, problems: Iterator[Stored]) -> str | None:
    """Writes the problems. Returns the full name of the snapshot.

    Returns None, and writes no dated snapshot, if there are no problems: snapshots of a service that lost its volumes
    must not displace older ones.
    """
    if where is None:
        with written(asked.target, force=asked.force, private=True) as file:
            file.writelines(_pieces(asked.target, problems))
        return str(asked.target)
    folder, name = where
    first = list(islice(problems, 1))
    if not (name or first):
        return None
    name = name or now()
    folder.write(name, _pieces(name, chain(first, problems)))
    return folder.path(name)


def _pieces(name: str, problems: Iterable[Stored]) -> Iterator[bytes]:
    lines = encoded(problems)
    return packed(lines) if name.endswith(".gz") else lines


def _counted(problems: Iterable[Stored], counts: "Counter[str]") -> Iterator[Stored]:
    for stored in problems:
        counts.update(problems=1, responses=len(stored.records), tokens=stored.tokens)
        yield stored
