"""The `histospec` command: the first word picks a module, which is imported only then."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import histospec.server.one_poller  # noqa: F401 - before all others
from histospec.server import process
from histospec.server.errors import ConfigError


class Command(NamedTuple):
    """A command name and the module whose `main(argv) -> int` runs it."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("histospec.server.app", "start a draft server"),
    "replay": Command("histospec.replay.command", "estimate what drafts would gain on recorded rollouts"),
    "snapshot": Command("histospec.server.commands.snapshot", "write the contents of a store or a service to a file"),
    "restore": Command("histospec.server.commands.restore", "load a snapshot into a store or a service"),
    "forget": Command("histospec.server.commands.forget", "delete old problems, and resume a paused --retention"),
    "bench": Command("histospec.server.commands.bench", "measure a running service under load"),
    "doctor": Command("histospec.client.doctor.command", "find out why a worker gets no drafts"),
    "status": Command("histospec.server.commands.status", "show the state of a running server"),
}

USAGE = """\
usage: histospec COMMAND [OPTIONS]

A draft server for RL rollouts: it stores the responses of a policy and drafts the next tokens of new ones.

commands:
{commands}

Run `histospec COMMAND --help` for the options of a command, `histospec --version` for the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. `argv` holds its words; None takes those of this process.

    Returns the exit code: 0 success, 1 failure, 2 wrong arguments, 128 + N ended by signal N.
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
        process.say(f"histospec: unknown command {words[0][:60]!r}; use one of {', '.join(COMMANDS)}")
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
