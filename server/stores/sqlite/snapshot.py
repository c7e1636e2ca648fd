"""Reads the contents of a SQLite store at one moment, whatever is written to it meanwhile."""

from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

from histospec.server.errors import StoreError
from histospec.server.stores.sqlite.file import DAMAGE, FILE_NAME, connect_to_read, is_damage, open_existing
from histospec.server.stores.sqlite.reader import SQLiteReader
from histospec.server.stores.sqlite.readers import Readers
from histospec.server.stores.sqlite.salvage import salvage
from histospec.server.stores.sqlite.structure import problem

log = structlog.get_logger()


class SQLiteSnapshot(SQLiteReader):
    """A read-only view. For a damaged file, reads a temporary copy of the readable contents.

    Raises ConfigError if there is no store, or one of another version.
    """

    def __init__(self, directory: Path, history_responses: int = 0) -> None:
        path = directory / FILE_NAME
        self._copy: TemporaryDirectory[str] | None = None
        try:
            connection = open_existing(path)
            damaged = bool(problem(connection))
        except DAMAGE as error:
            if not is_damage(error):
                raise
            connection = connect_to_read(path)
            damaged = True
        super().__init__(Readers([connection]), path, history_responses)
        if damaged and not self._salvage():
            raise StoreError(f"store: {path} is damaged, and none of it can be read")

    def _repair(self, generation: int, error: Exception) -> bool:
        """See SQLiteReader."""
        return self._copy is None and self._salvage()

    def _salvage(self) -> bool:
        self._copy = TemporaryDirectory(prefix="histospec-")
        copy = Path(self._copy.name) / FILE_NAME
        try:
            salvaged = salvage(self._path, copy)
        except DAMAGE as error:
            log.error("the damaged store cannot be read", file=str(self._path), reason=str(error))
            return False
        with self._readers.away():
            self._readers.end()
            self._readers.add(open_existing(copy))
        self._damage.lost(salvaged.lost)
        return True

    def close(self) -> None:
        """See Reader."""
        super().close()
        if self._copy:
            self._copy.cleanup()
