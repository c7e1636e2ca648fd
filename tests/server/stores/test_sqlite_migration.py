"""Files of older versions are migrated in slices, whatever ends the process in between."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from histospec.server.stores.opening import GivenUp, Progress
from histospec.server.stores.sqlite import migration
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.migration import open_file
from histospec.server.stores.sqlite.schema import SCHEMA_VERSION
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.old_files import OLD, OldFile

PROBLEMS = 200
KILLED_AT = """
import os, pathlib, signal, sys
from histospec.server.stores.opening import Progress
from histospec.server.stores.sqlite import migration

class Killing(Progress):
    left = int(sys.argv[2])

    def tell(self, text):
        super().tell(text)
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

migration.FIRST_SLICE, migration.SLICE_SECONDS = 1, 0  # slices are as small as they can be
migration.open_file(pathlib.Path(sys.argv[1]), copy=bool(int(sys.argv[3])), progress=Killing()).close()
"""


@pytest.fixture
def old(tmp_path: Path) -> OldFile:
    old = OldFile(tmp_path / FILE_NAME)
    old.add(PROBLEMS)
    return old


def update_until_killed(old: OldFile, tells: int, *, copy: bool = False) -> bool:
    """Migrates the file in a process that SIGKILL ends at its n-th slice. Returns whether it had finished."""
    command = [sys.executable, "-c", KILLED_AT, str(old.path), str(tells), str(int(copy))]
    code = subprocess.run(command, timeout=60, cwd="/", check=False).returncode
    assert code in (0, -signal.SIGKILL)
    return code == 0


def assert_up_to_date(old: OldFile, expected: object) -> None:
    store = SQLiteStore(old.path.parent, 10_000)
    try:
        held = {
            problem: [(record.epoch, record.tokens) for record in records]
            for namespace in store.newest_epochs()
            for problem, records in store.problems(namespace)
        }
        written = {prompt for (prompt,) in store._read("SELECT prompt FROM writes")}
        assert (store.newest_epochs(), held, written) == expected
        tables = {name for (name,) in store._read("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert "filling" not in tables
    finally:
        store.close()
    assert old.version() == SCHEMA_VERSION


class Slices(Progress):
    """Records the reported progress; gives up after some reports."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__()
        self.told: list[str] = []
        self._most = most

    def tell(self, text: str) -> None:
        if len(self.told) >= self._most:
            raise GivenUp
        self.told.append(text)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "FIRST_SLICE", 1)
    monkeypatch.setattr(migration, "SLICE_SECONDS", 0)


def test_an_update_is_what_looking_at_every_row_gives(old: OldFile) -> None:
    expected = old.expected()
    open_file(old.path, copy=False).close()
    assert_up_to_date(old, expected)


def test_an_update_says_how_far_it_is(old: OldFile, small_slices: None) -> None:
    slices = Slices()
    open_file(old.path, copy=False, progress=slices).close()
    assert slices.told[:2] == ["migrating to schema 3 of 6", "migrating to schema 3 of 6, 0 %"]
    shares = [int(text.split()[-2]) for text in slices.told if text.endswith(" %")]
    assert shares == sorted(shares)
    assert len(shares) > 20
    assert shares[-1] > 90
    assert slices.told[-1] == "migrating to schema 6 of 6"


def test_other_writers_have_their_turn_between_slices(old: OldFile, small_slices: None) -> None:
    """Each slice is a separate transaction: a lock held throughout would make this test's write fail at once."""

    class Writing(Slices):
        def tell(self, text: str) -> None:
            super().tell(text)
            with closing(sqlite3.connect(old.path, timeout=0)) as connection, connection:
                connection.execute("UPDATE estimators SET state = ?", (text.encode(),))

    open_file(old.path, copy=False, progress=Writing()).close()


@pytest.mark.parametrize("tells", [1, 2, 5, 40])
def test_an_update_that_is_killed_leaves_the_older_version_and_goes_on(old: OldFile, tells: int) -> None:
    expected = old.expected()
    assert not update_until_killed(old, tells)
    assert old.version() == OLD
    assert old.expected() == expected
    open_file(old.path, copy=False).close()
    assert_up_to_date(old, expected)


def test_an_update_that_is_killed_again_and_again_comes_to_its_end(old: OldFile) -> None:
    """A migration continues where it stopped; otherwise it would never get beyond the first slices."""
    expected = old.expected()
    tries = 1
    while not update_until_killed(old, 50):
        tries += 1
        assert tries < 20
    assert tries > 3
    assert_up_to_date(old, expected)


def test_what_an_older_server_writes_between_two_tries_counts(old: OldFile, small_slices: None) -> None:
    for _ in range(3):
        with pytest.raises(GivenUp):
            open_file(old.path, copy=False, progress=Slices(20))
        assert old.version() == OLD
        old.change()
        old.add(5)
    expected = old.expected()
    open_file(old.path, copy=False).close()
    assert_up_to_date(old, expected)


def test_a_copy_that_a_kill_cut_short_is_made_again(old: OldFile) -> None:
    expected = old.expected()
    assert not update_until_killed(old, 0, copy=True)
    assert sorted(path.name for path in old.path.parent.glob(f"{FILE_NAME}.v*")) == [f"{FILE_NAME}.v2.partial"]
    assert old.version() == OLD
    open_file(old.path).close()
    assert_up_to_date(old, expected)
    assert [path.name for path in old.path.parent.glob(f"{FILE_NAME}.v*")] == [f"{FILE_NAME}.v2"]


def test_the_lock_is_free_after_an_update_that_was_given_up(old: OldFile, tmp_path: Path) -> None:
    with pytest.raises(GivenUp):
        SQLiteStore(tmp_path, 8, progress=Slices(1))
    SQLiteStore(tmp_path, 8).close()


def test_an_update_may_need_more_room_than_the_limit_of_the_file(
    old: OldFile, open_store: Callable[..., SQLiteStore]
) -> None:
    """Otherwise, a file at its limit could never be migrated."""
    expected = old.expected()
    page = os.path.getsize(old.path) // 4096 * 4096
    open_file(old.path, page).close()
    assert_up_to_date(old, expected)
