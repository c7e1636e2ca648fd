"""Files that a SQLite store may find: of other versions, of other programs, in use."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from histospec.server.errors import ConfigError
from histospec.server.stores.sqlite.database import VERSION
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.server.stores.conftest import OpenSQLite
from tests.support.batches import put


def test_a_directory_serves_one_store_at_a_time(open_store: OpenSQLite, tmp_path: Path) -> None:
    store = open_store()
    with pytest.raises(ConfigError, match="another server uses it"):
        SQLiteStore(tmp_path, 8)
    store.close()
    SQLiteStore(tmp_path, 8).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from histospec.server.stores.sqlite.store import SQLiteStore;"
        "SQLiteStore(pathlib.Path(sys.argv[1]), 8); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd="/", timeout=60).returncode == -9
    SQLiteStore(tmp_path, 8).close()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.write_bytes(os.urandom(5000)), "cannot be used as a store"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE mine (x)"), "another program's database"),
        (lambda path: path.mkdir(), "cannot be used as a store"),
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, make: Callable[[Path], object], sentence: str) -> None:
    make(tmp_path / FILE_NAME)
    with pytest.raises(ConfigError, match=sentence):
        SQLiteStore(tmp_path, 8)


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_file_of_another_version_is_left_alone(open_store: OpenSQLite, tmp_path: Path, version: int) -> None:
    put(store := open_store(), b"kept")
    store.close()
    path = tmp_path / FILE_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    for read in (open_store, lambda: SQLiteSnapshot(tmp_path)):
        with pytest.raises(ConfigError, match=rf"\(schema {version}, this server needs 1\); take a snapshot with that"):
            read()
    assert path.read_bytes() == before


def test_a_file_whose_server_was_killed_before_it_made_the_tables_is_used(
    open_store: OpenSQLite, tmp_path: Path
) -> None:
    (tmp_path / FILE_NAME).touch()
    with pytest.raises(ConfigError, match="there is no store"):
        SQLiteSnapshot(tmp_path)
    put(open_store(), b"kept")
