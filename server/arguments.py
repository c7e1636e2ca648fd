"""The argument parser of every command: a wrong argument is reported in one sentence, like any other ConfigError."""

import argparse
from typing import NoReturn

from histospec.server.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise ConfigError(f"{message}; see {self.prog} --help")
