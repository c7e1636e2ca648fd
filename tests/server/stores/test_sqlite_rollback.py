"""Rollbacks to an older server: files of newer versions, and the copies for servers that cannot read them."""

import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from histospec.server.errors import ConfigError
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite import copies
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.migration import open_file
from histospec.server.stores.sqlite.salvage import salvage
from histospec.server.stores.sqlite.schema import SCHEMA_VERSION, VERSIONS, Version
from histospec.server.stores.sqlite.snapshot import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.ages import age, forgotten_down_to
from tests.support.batches import put
from tests.support.contents import content, fill
from tests.support.disks import small_disk
from tests.support.old_files import OLD, OldFile

NEXT = SCHEMA_VERSION + 1
ADDITIVE = (
    *VERSIONS,
    Version(
        """
ALTER TABLE prompts ADD COLUMN tokenizer TEXT;
ALTER TABLE responses ADD COLUMN temperature REAL;
ALTER TABLE responses ADD COLUMN worker TEXT NOT NULL DEFAULT '';
ALTER TABLE namespaces ADD COLUMN owner TEXT;
ALTER TABLE estimators ADD COLUMN format INTEGER NOT NULL DEFAULT 1;
ALTER TABLE writes ADD COLUMN reads INTEGER NOT NULL DEFAULT 0;
ALTER TABLE leaving ADD COLUMN asked_by TEXT;
ALTER TABLE clock ADD COLUMN zone TEXT;
CREATE TABLE notes (namespace TEXT PRIMARY KEY, note TEXT NOT NULL);
CREATE INDEX responses_by_epoch ON responses (epoch);
""",
        readable_from=VERSIONS[-1].readable_from,
    ),
)
NOT_ADDITIVE = (*VERSIONS, Version("ALTER TABLE responses RENAME COLUMN tokens TO packed;", readable_from=NEXT))
PROBLEM = Problem("run", b"prompt..")


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


@pytest.fixture
def path(tmp_path: Path, open_store: Callable[..., SQLiteStore]) -> Path:
    """Makes a file of this version, with a little of every kind of data."""
    store = open_store()
    fill(store)
    put(store, b"old.")
    store.close()
    return tmp_path / FILE_NAME


def newer(path: Path, versions: tuple[Version, ...]) -> None:
    """Does what a server of the next version does at its start."""
    open_file(path, versions=versions).close()
    assert version_of(path) == NEXT


def test_this_server_does_everything_with_a_newer_file_that_it_may_use(
    path: Path, open_store: Callable[..., SQLiteStore]
) -> None:
    before = content(store := open_store())
    store.close()
    newer(path, ADDITIVE)
    store = open_store(retention=60.0)
    assert content(store) == before
    put(store, b"new.", 1)
    store.append(ResponseBatch(Problem("b", b"prompt.."), [Record(b"1234", 3, 0.5, b"prob", b"\1", 7)])).result()
    assert [record.tokens for record in store.history(PROBLEM)] == [b"old.", b"new."]
    assert store.rewind("run", 0).result() > 0
    assert store.drop("other ❤").result() == 1
    store.save_estimator("b", b"learned").result()
    assert store.estimators()["b"] == b"learned"
    age(store, "namespace = 'b'", 100)
    left = store.count() - 1
    store.close()
    store = open_store(retention=60.0)
    assert forgotten_down_to(store, left)
    after = content(store)
    store.close()
    snapshot = SQLiteSnapshot(path.parent)
    assert content(snapshot) == after  # type: ignore[arg-type]
    snapshot.close()
    assert version_of(path) == NEXT  # unchanged, for the newer server
    with closing(open_file(path, versions=ADDITIVE)) as connection:
        assert connection.execute("SELECT count(*) FROM responses WHERE worker = '' AND temperature IS NULL").fetchone()


def test_what_can_be_read_of_a_damaged_newer_file_is_a_file_of_this_version(path: Path, tmp_path: Path) -> None:
    newer(path, ADDITIVE)
    assert salvage(path, tmp_path / "copy").lost == 0
    assert version_of(tmp_path / "copy") == SCHEMA_VERSION


def test_an_additive_change_keeps_no_copy(path: Path) -> None:
    newer(path, ADDITIVE)
    assert list(path.parent.glob(f"{FILE_NAME}.*")) == []


def test_a_newer_file_that_cannot_be_used_names_the_way_back(
    path: Path, open_store: Callable[..., SQLiteStore]
) -> None:
    before = content(store := open_store())
    store.close()
    newer(path, NOT_ADDITIVE)
    with pytest.raises(
        ConfigError, match=r"newer HistoSpec \(schema 7, this one knows 6, and the file needs 7\)"
    ) as no:
        open_store()
    with pytest.raises(ConfigError, match="the file needs 7"):
        SQLiteSnapshot(path.parent)
    assert version_of(path) == NEXT
    _, _, command = str(no.value).partition("without what was stored since: ")
    subprocess.run(command, shell=True, check=True)  # the message ends with a shell command
    assert content(open_store()) == before
    assert not copies.copy_of(path, SCHEMA_VERSION).exists()


def test_without_a_copy_there_is_no_way_back(path: Path, open_store: Callable[..., SQLiteStore]) -> None:
    open_file(path, copy=False, versions=NOT_ADDITIVE).close()
    with pytest.raises(ConfigError, match="upgrade this server, or give another directory"):
        open_store()
    assert list(path.parent.glob(f"{FILE_NAME}.*")) == []


def test_a_newer_file_of_servers_that_said_nothing_is_left_alone(
    path: Path, open_store: Callable[..., SQLiteStore]
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"DROP TABLE compatibility; PRAGMA user_version = {NEXT}")
    with pytest.raises(ConfigError, match="the file needs 7"):
        open_store()


def test_a_copy_is_the_file_before_the_update(tmp_path: Path) -> None:
    old = OldFile(tmp_path / FILE_NAME)
    old.add(100)
    expected = old.expected()
    open_file(old.path).close()
    copy = copies.copy_of(old.path, OLD)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, copy.name]
    old.path = copy
    assert (old.version(), old.expected()) == (OLD, expected)


def test_one_copy_is_kept_that_of_the_last_update(tmp_path: Path) -> None:
    old = OldFile(tmp_path / FILE_NAME)
    open_file(old.path).close()
    open_file(old.path, versions=NOT_ADDITIVE).close()
    assert [path.name for path in sorted(tmp_path.glob(f"{FILE_NAME}.*"))] == [f"{FILE_NAME}.v{SCHEMA_VERSION}"]


def test_the_log_says_at_every_start_that_a_copy_takes_room(
    tmp_path: Path, open_store: Callable[..., SQLiteStore], capsys: pytest.CaptureFixture[str]
) -> None:
    OldFile(tmp_path / FILE_NAME)
    open_store().close()
    for _ in range(2):
        capsys.readouterr()
        open_store().close()
        assert f"{FILE_NAME}.v{OLD}" in capsys.readouterr().out


def test_an_update_for_whose_copy_there_is_no_room_changes_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "data") as directory:
        old = OldFile(directory / FILE_NAME)
        old.add(100)
        expected = old.expected()
        with pytest.raises(
            ConfigError, match=r"a copy for them needs 1\d MiB, but only 1 MiB are free: free some space, or give --no"
        ):
            SQLiteStore(directory, 8)
        assert (old.version(), old.expected()) == (OLD, expected)
        assert sorted(path.name for path in directory.glob("*.v*")) == []
        store = SQLiteStore(directory, 8, upgrade_copy=False)
        assert store.count() == sum(map(len, expected[1].values()))
        store.close()


def test_a_file_that_is_older_for_a_snapshot_stays_as_it_is(tmp_path: Path) -> None:
    old = OldFile(tmp_path / FILE_NAME)
    shutil.copy(old.path, tmp_path / "before")
    with pytest.raises(ConfigError, match=r"older HistoSpec \(schema 2, this one needs 6\)"):
        SQLiteSnapshot(tmp_path)
    assert old.path.read_bytes() == (tmp_path / "before").read_bytes()
