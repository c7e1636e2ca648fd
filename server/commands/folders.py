"""Snapshots in a folder."""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

from histospec.replay.recordings import opened
from histospec.server.commands.place import DATED, Place
from histospec.server.errors import ConfigError, reason
from histospec.server.output_file import written

PARTIAL = ".partial"


class Folder(Place):
    """The snapshots in a folder."""

    def __init__(self, folder: str) -> None:
        self.where = folder
        self._path = Path(folder)

    def names(self) -> list[str]:
        """See Place."""
        try:
            return sorted(name for name in os.listdir(self._path) if DATED.fullmatch(name))
        except OSError as error:
            raise ConfigError(f"{self.where}: {reason(error)}; give a folder that can be read") from None

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """See Place."""
        with written(str(self._path / name), private=True) as file:
            file.writelines(pieces)

    def remove(self, names: Sequence[str]) -> None:
        """See Place."""
        newest = self.names()[-1:]
        for path in self._path.iterdir():
            stale = path.name.endswith(PARTIAL) and DATED.match(path.name) and [path.name] < newest
            if stale or path.name in names:
                with suppress(FileNotFoundError):
                    path.unlink()

    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """See Place."""
        return opened(str(self._path / name))
