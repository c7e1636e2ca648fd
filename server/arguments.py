"""The argument parser of every command: a wrong argument is reported in one sentence, like any other ConfigError."""

import argparse
from typing import NoReturn

from histospec.server.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def shown(size: object) -> str:
    """A size as it would be written on a command line: whole MiB and GiB with their unit; anything else as it is."""
    if isinstance(size, int) and size >= 1 << 20 and size % (1 << 20) == 0:
        return f"{size >> 30}GiB" if size % (1 << 30) == 0 else f"{size >> 20}MiB"
    return str(size)
