"""The command `python -m histospec.client.doctor`, and `histospec` in an installation with the client alone."""

import os
import sys
from collections.abc import Callable

from histospec.client.doctor.command import main


def doctor() -> int:
    """Runs the doctor with the arguments of this process. Returns its exit code."""
    return _run(lambda: main(sys.argv[1:]))


def client_only() -> int:
    """Runs the command `histospec` of an installation without the server. Returns its exit code."""
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
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the terminal cannot show
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # e.g. `| head`; with the pipe as stdout the interpreter would try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(doctor())
