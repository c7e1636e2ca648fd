"""The argument parser of every command: it reports a wrong argument in one sentence, as a ConfigError."""

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from histospec.server.errors import ConfigError

MOST_COST = 1000.0  # of verifying one draft token, in steps without drafts
LONGEST = 500  # characters of a message
N = TypeVar("N", int, float)


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError. See argparse."""
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
            raise argparse.ArgumentTypeError(f"must be {what}, is {text[:60]!r}") from None
        if not least <= value or (above and value == least):  # also true for nan
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {least:g}, is {text[:60]}")
        if not value <= most:
            raise argparse.ArgumentTypeError(f"must be at most {most:.15g}, is {text[:60]}")
        return value

    return parse


def shown(size: object) -> str:
    """Returns a size as a user would type it: whole MiB and GiB with their unit, anything else unchanged."""
    if isinstance(size, int) and size >= 1 << 20 and size % (1 << 20) == 0:
        return f"{size >> 30}GiB" if size % (1 << 30) == 0 else f"{size >> 20}MiB"
    return str(size)
