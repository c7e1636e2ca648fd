"""A SQLite file or its write-ahead log that was cut: the loss is counted, and nothing is acknowledged into a hole."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from histospec.server import cli
from histospec.server.stores.interface import Problem
from histospec.server.stores.sqlite import store as sqlite_store
from histospec.server.stores.sqlite.file import FILE_NAME, besides
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.batches import put
from tests.support.contents import to_load
from tests.support.waiting import eventually

PROBLEMS = 60
SIZES = ["half", "a tenth", "a page", "a few bytes", "nothing"]


def cut(path: Path, size: str) -> None:
    """Truncates a file in place."""
    held = path.stat().st_size
    left = {"half": held // 2, "a tenth": held // 10, "a page": 4096, "a few bytes": 50, "nothing": 0}[size]
    os.truncate(path, left)


def fill(store: SQLiteStore) -> None:
    for number in range(PROBLEMS):
        put(store, bytes([number]) * 4000, prompt=bytes([number] * 4))


def contents(store: SQLiteStore) -> int:
    return sum(len(batch.records) for batch in to_load(store))


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Returns a directory as a killed server leaves it: with most responses in the write-ahead log."""
    store = SQLiteStore(tmp_path / "running", 8)
    fill(store)
    store.submit(lambda _: None).result()
    (tmp_path / "killed").mkdir()
    for file in besides(tmp_path / "running" / FILE_NAME):
        shutil.copy(file, tmp_path / "killed" / file.name)
    store.close()
    return tmp_path / "killed"


@pytest.mark.parametrize("large", [False, True])  # whether the file is too large to be checked before the first write
@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_was_cut_while_stopped_has_lost_responses(
    tmp_path: Path, size: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    store.close()
    cut(tmp_path / FILE_NAME, size)
    if large:
        monkeypatch.setattr(sqlite_store, "SMALL", -1)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"next", prompt=b"another.")
    left = contents(store) - 1
    assert left < PROBLEMS
    assert 1 <= store.damaged_responses <= PROBLEMS - left
    assert list(tmp_path.glob(f"{FILE_NAME}.damaged-*"))
    assert [r.tokens for r in store.history(Problem("run", b"another."))] == [b"next"]
    lost = store.damaged_responses
    store.close()
    store = SQLiteStore(tmp_path, 8)
    assert store.damaged_responses == lost  # until a person has seen it
    store.close()
    for note in tmp_path.glob(f"{FILE_NAME}.damaged-*.lost"):
        note.unlink()
    store = SQLiteStore(tmp_path, 8)
    assert store.damaged_responses == 0
    store.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_snapshot_of_a_file_that_was_cut_fails(
    tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older snapshots stay."""
    monkeypatch.delenv("HISTOSPEC_STORE", raising=False)
    store = SQLiteStore(tmp_path / "data", 8)
    fill(store)
    store.close()
    backups = tmp_path / "backups"
    backups.mkdir()
    command = ["snapshot", f"{backups}/", "--keep", "1", "--data-dir", str(tmp_path / "data")]
    assert cli.main(command) == 0
    (good,) = backups.iterdir()
    good = good.rename(good.with_name("2020-01-01T00-00-00Z.jsonl.gz"))
    cut(tmp_path / "data" / FILE_NAME, size)
    capsys.readouterr()
    assert cli.main(command) == (1 if size != "nothing" else 2)
    assert good.exists()
    message = "there is no store at" if size == "nothing" else "are damaged and left out"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", [None, *SIZES])
def test_a_log_that_was_cut_after_a_kill_has_lost_responses(killed: Path, size: str | None) -> None:
    log = besides(killed / FILE_NAME)[1]
    assert log.stat().st_size > 4000 * PROBLEMS // 2
    if size is not None:
        cut(log, size)
    store = SQLiteStore(killed, 8)
    left = contents(store)
    assert (store.damaged_responses, left) == (0, PROBLEMS) if size is None else store.damaged_responses >= 1
    put(store, b"next")
    assert contents(store) == left + 1
    store.close()


@pytest.mark.parametrize("where", [0.0, 0.01, 0.5, 0.99])
def test_a_log_that_was_damaged_after_a_kill_has_lost_responses(killed: Path, where: float) -> None:
    """SQLite reads it up to the first damaged frame."""
    log = besides(killed / FILE_NAME)[1]
    at = int(where * log.stat().st_size)
    with log.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    store = SQLiteStore(killed, 8)
    left = contents(store)
    assert store.damaged_responses >= 1
    put(store, b"next")
    assert contents(store) == left + 1
    store.close()


def test_a_file_that_was_deleted_after_a_kill_has_lost_responses(killed: Path) -> None:
    (killed / FILE_NAME).unlink()
    store = SQLiteStore(killed, 8)
    put(store, b"next")
    assert (contents(store), store.damaged_responses) == (1, 1)
    store.close()


def test_a_server_knows_of_a_loss_that_a_snapshot_found(killed: Path) -> None:
    cut(besides(killed / FILE_NAME)[1], "half")
    for _ in range(2):
        snapshot = SQLiteSnapshot(killed)
        assert snapshot.damaged_responses == 1
        snapshot.close()
    store = SQLiteStore(killed, 8)
    assert store.damaged_responses == 1
    store.close()


def test_a_snapshot_beside_a_server_that_begins_its_log_anew_is_whole(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None) as other:
        checkpoint(other)
    put(store, b"next")
    snapshot = SQLiteSnapshot(tmp_path)
    assert snapshot.damaged_responses == 0
    snapshot.close()
    store.close()


def test_a_log_that_was_deleted_after_a_kill_has_lost_responses(killed: Path) -> None:
    besides(killed / FILE_NAME)[1].unlink()
    store = SQLiteStore(killed, 8)
    assert store.damaged_responses >= 1
    store.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_cut_while_it_is_open_takes_no_later_response_along(
    tmp_path: Path, which: int, size: str
) -> None:
    """The first write afterwards puts a new file in its place."""
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    store.close()
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    cut(besides(tmp_path / FILE_NAME)[which], size)
    for number in range(5):
        put(store, bytes([number] * 8), prompt=b"later...")
    assert store.damaged_responses >= 1
    store.close()
    store = SQLiteStore(tmp_path, 8)
    assert [r.tokens for r in store.history(Problem("run", b"later..."))] == [bytes([n] * 8) for n in range(5)]
    store.close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_cut_is_noticed_without_a_write(tmp_path: Path, which: int) -> None:
    """Metrics and `/status` ask for trouble."""
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    store.submit(lambda connection: None).result()
    cut(besides(tmp_path / FILE_NAME)[which], "a few bytes")
    eventually(lambda: not store.trouble and store.damaged_responses, "the loss is not counted")
    store.close()


@pytest.mark.parametrize("size", ["half", "nothing"])
def test_a_log_that_is_cut_during_a_write_is_noticed(tmp_path: Path, size: str) -> None:
    """SQLite writes at its old end and leaves a hole, so its size alone does not show it."""
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    cuts: list[str] = []

    def meanwhile(connection: sqlite3.Connection) -> None:
        if not cuts:
            cuts.append(size)
            cut(besides(tmp_path / FILE_NAME)[1], size)
        connection.execute("INSERT OR IGNORE INTO namespaces VALUES ('new', 7)")

    store.submit(meanwhile).result()
    assert store.damaged_responses >= 1
    store.close()
    store = SQLiteStore(tmp_path, 8)
    assert store.newest_epochs()["new"] == 7
    store.close()


def vacuum(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM responses WHERE id % 2")
    connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def checkpoint(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.parametrize("shrink", [vacuum, checkpoint])
def test_a_file_that_another_program_shrinks_is_whole(
    tmp_path: Path, shrink: Callable[[sqlite3.Connection], None]
) -> None:
    store = SQLiteStore(tmp_path, 8)
    fill(store)
    sizes = [file.stat().st_size for file in besides(tmp_path / FILE_NAME)]
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None) as other:
        shrink(other)
    assert any(file.stat().st_size < size for file, size in zip(besides(tmp_path / FILE_NAME), sizes, strict=True))
    put(store, b"next")
    put(store, b"last")
    assert store.trouble == ""
    assert store.damaged_responses == 0
    assert not list(tmp_path.glob(f"{FILE_NAME}.damaged-*"))
    store.close()


def test_a_server_that_was_killed_while_it_created_its_store_creates_it_again(tmp_path: Path) -> None:
    SQLiteStore(tmp_path, 8).close()
    (tmp_path / FILE_NAME).rename(tmp_path / f"{FILE_NAME}.creating")
    os.truncate(tmp_path / f"{FILE_NAME}.creating", 4096)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"kept")
    assert (contents(store), store.damaged_responses) == (1, 0)
    store.close()
