"""The files of the SQLite store: who may read them, and what happens if they are missing or replaced."""

import ast
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from histospec.server import cli
from histospec.server.errors import ConfigError, StoreError
from histospec.server.stores.interface import Problem
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import put

WAL = f"{FILE_NAME}-wal"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    store = SQLiteStore(tmp_path / "data", 8)
    yield store
    store.close()


def delete(*names: str) -> Callable[[Path], None]:
    def fault(data: Path) -> None:
        for name in names:
            (data / name).unlink()

    return fault


def swap(data: Path) -> None:
    (data / FILE_NAME).rename(data / "moved")
    (data / FILE_NAME).write_bytes((data / "moved").read_bytes())


@pytest.mark.parametrize("ago", [0, 3600])  # seconds since the directory changed: recent, and long enough to trust that
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (delete(FILE_NAME), f"{FILE_NAME} was deleted or moved"),
        (delete(FILE_NAME, WAL, f"{FILE_NAME}-shm"), f"{FILE_NAME} was deleted or moved"),
        (delete(WAL), "wal was deleted or moved"),
        (delete(f"{FILE_NAME}-shm"), "shm was deleted or moved"),
        (swap, f"{FILE_NAME} was replaced"),
        (lambda data: data.rename(data.with_name("away")), "deleted or moved"),
    ],
)
def test_nothing_is_acknowledged_into_files_that_are_gone(
    store: SQLiteStore, tmp_path: Path, fault: Callable[[Path], object], says: str, ago: int
) -> None:
    os.utime(tmp_path / "data", (time.time() - ago,) * 2)
    put(store, b"kept")
    assert store.trouble == ""
    fault(tmp_path / "data")
    with pytest.raises(StoreError, match=f"{says} while the server has it open; bring it back or restart the server"):
        put(store, b"lost")
    assert says in store.trouble
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"kept"]  # open files are still read


def test_a_file_that_vanishes_while_a_group_is_written_is_not_acknowledged(store: SQLiteStore, tmp_path: Path) -> None:
    def vanish(connection: sqlite3.Connection) -> None:
        (tmp_path / "data" / FILE_NAME).unlink()

    with pytest.raises(StoreError, match="deleted or moved"):
        store.submit(vanish).result()


def test_a_closed_store_has_no_trouble(store: SQLiteStore, capfd: pytest.CaptureFixture[str]) -> None:
    """Its write-ahead log is gone; Prometheus may ask for metrics between the end of the store and that of the page."""
    put(store, b"kept")
    store.close()
    assert store.trouble == ""
    out, err = capfd.readouterr()
    assert "nothing can be stored" not in out + err


def test_a_directory_that_comes_back_is_used_again(store: SQLiteStore, tmp_path: Path) -> None:
    put(store, b"kept")
    (tmp_path / "data").rename(tmp_path / "away")
    with pytest.raises(StoreError):
        put(store, b"lost")
    (tmp_path / "away").rename(tmp_path / "data")
    put(store, b"kept")
    assert store.trouble == ""
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"kept", b"kept"]


@pytest.mark.parametrize("name", ["data", "elsewhere"])
def test_a_lock_file_that_is_gone_lets_no_second_server_in(store: SQLiteStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "data" / "lock").unlink()
    (tmp_path / "data").rename(tmp_path / name)
    with pytest.raises(ConfigError, match="another server uses it"):
        SQLiteStore(tmp_path / name, 8)
    (tmp_path / name).rename(tmp_path / "data")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def run_with_umask(umask: int, directory: Path) -> dict[str, str]:
    """Returns the files of a server, and those while it runs: {name: mode}."""
    code = """
import os, sys, pathlib
os.umask(int(sys.argv[1], 8))
from histospec.server.stores.sqlite.store import SQLiteStore
data = pathlib.Path(sys.argv[2])
store = SQLiteStore(data, 8)
store.save_estimator("run", b"learned").result()
print({path.name: oct(path.stat().st_mode & 0o7777) for path in data.iterdir()})
store.close()
"""
    command = [sys.executable, "-c", code, oct(umask), str(directory)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True, timeout=60)
    files: dict[str, str] = ast.literal_eval(done.stdout)
    return files


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_what_the_server_makes_is_its_own(tmp_path: Path, umask: int) -> None:
    data = tmp_path / "new"
    files = run_with_umask(umask, data)
    assert set(files) == {"lock", FILE_NAME, WAL, f"{FILE_NAME}-shm"}
    assert set(files.values()) == {"0o600"}
    assert mode(data) == 0o700


@pytest.mark.parametrize(
    ("before", "other", "after"),
    [
        (0o755, None, 0o700),
        (0o755, "notes.txt", 0o755),  # a directory with other files belongs to a person
        (0o2775, None, 0o2775),  # as fsGroup sets it up
        (0o1777, None, 0o1777),
    ],
)
def test_an_older_directory_is_tightened_where_it_is_the_servers_alone(
    tmp_path: Path, before: int, other: str | None, after: int
) -> None:
    SQLiteStore(tmp_path / "data", 8).close()
    data = tmp_path / "data"
    for path in data.iterdir():
        path.chmod(0o644)
    if other:
        (data / other).write_text("")
        (data / other).chmod(0o644)
    data.chmod(before)
    SQLiteStore(data, 8).close()
    assert mode(data) == after
    assert {mode(data / name) for name in ("lock", FILE_NAME)} == {0o600}
    assert not other or mode(data / other) == 0o644


def test_a_snapshot_is_private(store: SQLiteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, b"kept")
    monkeypatch.delenv("HISTOSPEC_STORE", raising=False)
    before = os.umask(0)
    try:
        assert cli.main(["snapshot", str(tmp_path / "all.jsonl"), "--data-dir", str(tmp_path / "data")]) == 0
    finally:
        os.umask(before)
    assert mode(tmp_path / "all.jsonl") == 0o600
