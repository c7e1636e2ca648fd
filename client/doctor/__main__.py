"""`python -m histospec.client.doctor`, and `histospec` where the client is installed alone."""

import os
import sys
from collections.abc import Callable

from histospec.client.doctor.command import main


def doctor() -> int:
    """The doctor as a process of its own. -> its exit code."""
    return _run(lambda: main(sys.argv[1:]))


def client_only() -> int:
    """The command `histospec` of an installation that has no server."""
    words = sys.argv[1:]
    if words[:1] == ["doctor"]:
        return _run(lambda: main(words[1:]))
    if words[:1] in (["-h"], ["--help"], ["help"]):
        sys.stdout.write(f"usage: histospec doctor [OPTIONS]\n\n{_ALONE}\n")
        return 0
    asked = f" {words[0][:60]}" if words else ""
    sys.stderr.write(f"histospec{asked}: {_ALONE}\n")
    return 2


_ALONE = (
    "only the client is installed here, and its command is `histospec doctor`; for the others, install HistoSpec "
    "without HISTOSPEC_CLIENT_ONLY=1"
)


def _run(command: Callable[[], int]) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal cannot show
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `| head`; else the interpreter tries again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(doctor())
