"""The argument parser of every command: it reports a wrong argument in one sentence, as a ConfigError."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from histospec.protocol.redaction import quoted, unknown_arguments, without_logins
from histospec.server.errors import ConfigError

MOST_COST = 1000.0  # of verifying one draft token, in steps without drafts
LONGEST = 500  # characters of a message
N = TypeVar("N", int, float)


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing usage and exiting."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parses all arguments. See argparse, whose own error quotes the values of unknown options."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(unknown_arguments(rest))
        return options

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError. See argparse."""
        message = without_logins(message)
        message = message if len(message) <= LONGEST else message[:LONGEST] + "..."
        raise ConfigError(f"{message}; see {self.prog} --help")


def whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """Returns a parser for a whole number from `least` to `most`."""
    return _number(int, "a whole number", least, most)


def amount(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Returns a parser for a number from `least` to `most`; with `above`, `least` itself is not allowed."""
    return _number(float, "a number", least, most, above)


def _number(kind: Callable[[str], N], what: str, least: float, most: float, above: bool = False) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"must be {what}, is {quoted(text)}") from None
        if not least <= value or (above and value == least):  # also true for nan
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {least:g}, is {value:g}")
        if not value <= most:
            raise argparse.ArgumentTypeError(f"must be at most {most:.15g}, is {value:.15g}")
        return value

    return parse


def shown(size: object) -> str:
    """Returns a size as a user would type it: whole MiB and GiB with their unit, anything else unchanged."""
    if isinstance(size, int) and size >= 1 << 20 and size % (1 << 20) == 0:
        return f"{size >> 30}GiB" if size % (1 << 30) == 0 else f"{size >> 20}MiB"
    return str(size)
