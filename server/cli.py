"""The `histospec` command: the first word picks a module, imported only then."""

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import NamedTuple

from histospec.server.errors import ConfigError, HistoSpecError


class Command(NamedTuple):
    """A word of the command line and the module whose `main(argv) -> int`, or another function, it runs."""

    module: str
    summary: str
    function: str = "main"


COMMANDS = {
    "serve": Command("histospec.server.app", "start a draft server"),
    "replay": Command("histospec.server.replay", "what would drafting gain on recorded rollouts?"),
    "snapshot": Command("histospec.server.snapshot", "write what a store holds to a file", "snapshot"),
    "restore": Command("histospec.server.snapshot", "bring such a file back into a store", "restore"),
    "forget": Command("histospec.server.forget", "forget what is old, and end a pause of --retention"),
    "bench": Command("histospec.server.bench", "load a running service and say what it takes"),
    "status": Command("histospec.server.status", "how a running server is doing"),
}

USAGE = """\
usage: histospec COMMAND [OPTIONS]

Remembers what a policy wrote and drafts what it is about to write.

commands:
{commands}

Try `histospec COMMAND --help` for the options of one, `histospec --version` for the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrongly asked."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:8} {command.summary}" for name, command in COMMANDS.items())
        (sys.stdout if words else sys.stderr).write(USAGE.format(commands=commands))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"histospec {metadata.version('histospec')}\n")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        sys.stderr.write(f"histospec: there is no command {words[0]!r}; use one of {', '.join(COMMANDS)}\n")
        return 2
    try:
        return int(getattr(import_module(command.module), command.function)(words[1:]))
    except ConfigError as error:
        sys.stderr.write(f"histospec {words[0]}: {error}\n")
        return 2
    except HistoSpecError as error:
        sys.stderr.write(f"histospec {words[0]}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
