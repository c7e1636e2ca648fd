"""The `histospec` command: the first word picks a module, which is imported only then."""

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from histospec.protocol.grpc_settings import import_grpc, one_poller
from histospec.protocol.redaction import quoted, without_logins

import_grpc(one_poller())  # before any other import of gRPC, so that fewer of its threads wake for each message

from histospec.server import process  # noqa: E402
from histospec.server.errors import ConfigError, HistoSpecError, reason  # noqa: E402

LONGEST = 2000  # characters of an error message


class Command(NamedTuple):
    """A command name and the module whose `main(argv) -> int` runs it."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("histospec.server.app", "start a draft server"),
    "run": Command(
        "histospec.server.commands.run", "run a command, such as a training job, with a draft server beside it"
    ),
    "replay": Command("histospec.replay.command", "estimate what drafts would gain on recorded rollouts"),
    "snapshot": Command("histospec.server.commands.snapshot", "write the contents of a store or a service to a file"),
    "restore": Command("histospec.server.commands.restore", "load a snapshot into a service"),
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
        return _report(" ".join(["histospec", *words[:1]]), error)


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
        process.say(f"histospec: unknown command {quoted(words[0])}; use one of {', '.join(COMMANDS)}")
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


def _report(prog: str, error: BaseException) -> int:
    """Prints what went wrong, if needed. Returns the exit code: 1 failure, 2 wrong arguments, 128 + N for signal N."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + error.number if isinstance(error, process.Interrupted) else 130
    if isinstance(error, BrokenPipeError) and error.filename == process.STDOUT:
        return 1  # the reader left, as `| head` does, and needs no message
    sentence = without_logins(" ".join(_sentence(error).split()))
    process.say(f"{prog}: {sentence if len(sentence) <= LONGEST else sentence[:LONGEST] + '...'}")
    return 2 if isinstance(error, ConfigError) else 1


def _sentence(error: BaseException) -> str:
    if isinstance(error, HistoSpecError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {reason(error)}" if error.filename else reason(error)
    if isinstance(error, MemoryError):
        return "out of memory; process less at a time, or provide more memory"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    if isinstance(error, ModuleNotFoundError):
        return f"the module {error.name} is missing; install HistoSpec again: pip install 'histospec[all]'"
    return f"unexpected {type(error).__name__}: {error} ({_where(error)}); please report it with this line"


def _where(error: BaseException) -> str:
    """Returns the innermost line of this project, such as `status_tables.py:41`."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [one for one in frames if str(one[0].f_globals.get("__name__")).startswith("histospec.")] or frames
    return f"{Path(ours[-1][0].f_code.co_filename).name}:{ours[-1][1]}" if ours else "unknown line"
