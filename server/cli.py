"""The `histospec` command: the first word picks a module, imported only then."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from histospec.server import process
from histospec.server.errors import ConfigError


class Command(NamedTuple):
    """A word of the command line and the module whose `main(argv) -> int` it runs."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("histospec.server.app", "start a draft server"),
    "replay": Command("histospec.replay.command", "what would drafting gain on recorded rollouts?"),
    "snapshot": Command("histospec.server.commands.snapshot", "write what a store or a service holds to a file"),
    "restore": Command("histospec.server.commands.restore", "bring such a file back into a store or a service"),
    "forget": Command("histospec.server.commands.forget", "forget what is old, and end a pause of --retention"),
    "bench": Command("histospec.server.commands.bench", "load a running service and say what it takes"),
    "doctor": Command("histospec.client.doctor.command", "find out why a worker gets no drafts"),
    "status": Command("histospec.server.commands.status", "how a running server is doing"),
}

USAGE = """\
usage: histospec COMMAND [OPTIONS]

Remembers what a policy wrote and drafts what it is about to write.

commands:
{commands}

Try `histospec COMMAND --help` for the options of one, `histospec --version` for the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. `argv`: its words; None where this process is for it.

    Returns its exit code: 0 done, 1 failed, 2 wrongly asked, 128 + N ended by signal N.
    """
    if argv is None:
        return process.run(lambda: main(sys.argv[1:]))
    words = list(argv)
    try:
        return _run(words)
    except (Exception, KeyboardInterrupt) as error:
        from histospec.server.failures import tell

        return tell(" ".join(["histospec", *words[:1]]), error)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:8} {command.summary}" for name, command in COMMANDS.items())
        (sys.stdout if words else sys.stderr).write(USAGE.format(commands=commands))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from importlib import metadata

        sys.stdout.write(f"histospec {metadata.version('histospec')}\n")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        process.say(f"histospec: there is no command {words[0][:60]!r}; use one of {', '.join(COMMANDS)}")
        return 2
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("histospec"):
            raise
        extra = command.module.split(".")[1]  # named as the package that needs it
        text = f"needs the package {error.name}, which is not installed: pip install 'histospec[{extra}]'"
        raise ConfigError(text) from error
    process.imported(logs=words[0] == "serve")
    return int(module.main(words[1:]))
