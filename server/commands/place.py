"""A place that holds snapshots. Each is named by the time at which it was begun."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

from histospec.server.errors import ConfigError

DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ\.jsonl\.gz")


class Place(ABC):
    """Holds snapshots by name. Methods raise ConfigError, or TargetError if writing fails half way."""

    where: str
    """Its name in messages: a folder or a URL."""

    @abstractmethod
    def names(self) -> list[str]:
        """The dated snapshots, oldest first."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a whole snapshot, or nothing, whatever the pieces raise. It takes the place of one of this name."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes these snapshots, and the remains of older ones that were never finished."""

    @abstractmethod
    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """The bytes of one, for reading from its beginning, as often as wanted."""

    def path(self, name: str) -> str:
        """The full name of a snapshot in messages."""
        return f"{self.where.rstrip('/')}/{name}"

    def newest(self) -> str:
        """The name of the newest one. Raises ConfigError where there is none."""
        names = self.names()
        if not names:
            raise ConfigError(f"{self.where}: there is no snapshot such as 2026-11-23T02-00-00Z.jsonl.gz; give another")
        return names[-1]

    def keep(self, number: int) -> list[str]:
        """Removes all but the newest so many. -> the names of those removed."""
        old = self.names()[:-number]
        self.remove(old)
        return old


def now() -> str:
    """The name of a snapshot that begins now."""
    return time.strftime("%Y-%m-%dT%H-%M-%SZ.jsonl.gz", time.gmtime())
