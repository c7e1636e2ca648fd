"""A place that holds snapshots. Each dated snapshot is named by its start time."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

from histospec.server.errors import ConfigError

DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ\.jsonl\.gz")


class Place(ABC):
    """Holds snapshots by name. Methods raise ConfigError, or OutputError if writing fails halfway."""

    where: str
    """Its name in messages: a folder or a URL."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of the dated snapshots, oldest first."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a whole snapshot, or nothing if `pieces` raises. Replaces a snapshot with this name."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes these snapshots, and the leftovers of older unfinished ones."""

    @abstractmethod
    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a snapshot for reading from its beginning. May be called more than once."""

    def path(self, name: str) -> str:
        """Returns the full name of a snapshot for messages."""
        return f"{self.where.rstrip('/')}/{name}"

    def newest(self) -> str:
        """Returns the name of the newest snapshot. Raises ConfigError if there is none."""
        names = self.names()
        if not names:
            raise ConfigError(f"{self.where}: has no snapshot such as 2026-11-23T02-00-00Z.jsonl.gz; give another")
        return names[-1]

    def keep(self, number: int) -> list[str]:
        """Removes all but the newest `number` snapshots. Returns the removed names."""
        old = self.names()[:-number]
        self.remove(old)
        return old


def now() -> str:
    """Returns the name of a snapshot that starts now."""
    return time.strftime("%Y-%m-%dT%H-%M-%SZ.jsonl.gz", time.gmtime())
