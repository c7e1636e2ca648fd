"""What a SQLite store holds at one moment, whatever is written to it meanwhile."""

import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

from histospec.server.sqlite_file import FILE_NAME, is_damage, open_existing
from histospec.server.sqlite_reader import SQLiteReader
from histospec.server.sqlite_salvage import salvage


def open_snapshot(directory: Path, history_responses: int = 0) -> SQLiteReader:
    """To be read. Of a damaged file it is what can be read, and says how many responses cannot.

    Raises ConfigError where there is no store, or one of another version.
    """
    path = directory / FILE_NAME
    try:
        connection = open_existing(path)
        if connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
            return SQLiteReader(connection, path, history_responses)
        connection.close()
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
    return _Salvaged(path, history_responses)


class _Salvaged(SQLiteReader):
    """What can be read of a damaged file, in a temporary copy."""

    def __init__(self, path: Path, history_responses: int) -> None:
        self._folder = TemporaryDirectory(prefix="histospec-")
        copy = Path(self._folder.name) / FILE_NAME
        try:
            salvaged = salvage(path, copy)
            super().__init__(open_existing(copy), copy, history_responses)
        except BaseException:
            self._folder.cleanup()
            raise
        self._damage.lost(salvaged.lost)

    def close(self) -> None:
        """See Reader."""
        super().close()
        self._folder.cleanup()
