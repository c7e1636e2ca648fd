"""Turns the exception that ended a command into one sentence and an exit code."""

import traceback
from pathlib import Path

from histospec.server.errors import ConfigError, HistoSpecError
from histospec.server.process import STDOUT, Interrupted, say

LONGEST = 2000  # characters of a sentence


def tell(prog: str, error: BaseException) -> int:
    """Prints what went wrong, if needed. Returns the exit code: 1 failure, 2 wrong arguments, 128 + N for signal N."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + error.number if isinstance(error, Interrupted) else 130
    if isinstance(error, BrokenPipeError) and error.filename == STDOUT:
        return 1  # the reader left, as `| head` does, and needs no message
    sentence = " ".join(_sentence(error).split())
    say(f"{prog}: {sentence if len(sentence) <= LONGEST else sentence[:LONGEST] + '...'}")
    return 2 if isinstance(error, ConfigError) else 1


def reason(error: BaseException) -> str:
    """Returns the operating system's reason for an error."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()


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
