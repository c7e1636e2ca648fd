"""Files that a SQLite store may find: of older and newer versions, of other programs, in use."""

import hashlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from histospec.server.errors import ConfigError
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.snapshot import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.support.ages import age, forgotten_down_to
from tests.support.batches import put
from tests.support.contents import to_load

FIRST_VERSION = """
PRAGMA application_id = 0x48495354; PRAGMA user_version = 1;
CREATE TABLE prompts (
    id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, problem TEXT NOT NULL, digest BLOB NOT NULL, tokens BLOB NOT NULL
);
CREATE INDEX prompts_by_digest ON prompts (namespace, problem, digest);
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT, prompt INTEGER NOT NULL REFERENCES prompts (id), epoch INTEGER NOT NULL,
    reward REAL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL, generated BLOB NOT NULL
);
CREATE INDEX responses_by_prompt ON responses (prompt, epoch);
INSERT INTO prompts VALUES (1, 'run', '', X'DIGEST', CAST('prompt..' AS BLOB));
INSERT INTO responses VALUES (1, 1, 0, NULL, CAST('old.' AS BLOB), X'', X'');
""".replace("DIGEST", hashlib.blake2b(b"prompt..", digest_size=8).hexdigest())

# The additions of the second and third version, with a little of every kind of data.


THIRD_VERSION = (
    FIRST_VERSION
    + """
PRAGMA user_version = 3;
CREATE TABLE estimators (namespace TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE namespaces (namespace TEXT PRIMARY KEY, newest_epoch INTEGER NOT NULL);
CREATE TABLE writes (prompt INTEGER PRIMARY KEY REFERENCES prompts (id), latest REAL NOT NULL);
CREATE TRIGGER prompts_leave AFTER DELETE ON prompts BEGIN
    DELETE FROM responses WHERE prompt = old.id;
    DELETE FROM writes WHERE prompt = old.id;
END;
INSERT INTO estimators VALUES ('run', CAST('learned' AS BLOB));
INSERT INTO namespaces VALUES ('run', 9);
INSERT INTO writes VALUES (1, 1e9);
INSERT INTO responses VALUES (7, 1, 9, 0.5, CAST('12345678' AS BLOB), CAST('scores..' AS BLOB), X'0001');
"""
)


def test_a_directory_serves_one_store_at_a_time(open_store: Callable[..., SQLiteStore], tmp_path: Path) -> None:
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


def test_a_file_of_a_newer_version_is_left_alone(open_store: Callable[..., SQLiteStore], tmp_path: Path) -> None:
    open_store().close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match=r"newer HistoSpec \(schema 7, this one knows 6, and the file needs 7\)"):
        SQLiteStore(tmp_path, 8)


def test_a_file_of_the_first_version_is_brought_up_to_date(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(FIRST_VERSION)
    store = open_store()
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"old."]
    store.save_estimator("run", b"learned").result()
    put(store, b"new.")
    store.close()
    store = open_store()
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"old.", b"new."]
    assert store.estimators() == {"run": b"learned"}


def test_a_file_from_before_seeds_keeps_everything_and_takes_seeds(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(THIRD_VERSION)
    with pytest.raises(ConfigError, match=r"older HistoSpec \(schema 3, this one needs 6\); start this server on it"):
        SQLiteSnapshot(tmp_path)
    kept = [Record(b"old.", 0), Record(b"12345678", 9, 0.5, b"scores..", b"\0\1")]
    problem = Problem("run", b"prompt..")
    store = open_store()
    assert store.history(problem) == kept
    assert (store.newest_epochs(), store.estimators()) == ({"run": 9}, {"run": b"learned"})
    assert store._read("SELECT latest FROM writes") == [(1e9,)]
    seeded = Record(b"new.", 9, seed=-5)
    store.append(ResponseBatch(problem, [seeded])).result()
    store.close()
    store = open_store()
    assert store.history(problem) == [*kept, seeded]
    assert [record for some in to_load(store) for record in some.records] == [*kept, seeded]
    store.close()
    store = open_store(retention=60.0)
    assert store.count() == 3
    age(store, "namespace = 'run'", 100)
    store.close()
    assert forgotten_down_to(open_store(retention=60.0), 0)  # the trigger is there


def test_an_update_that_does_not_succeed_changes_nothing(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(FIRST_VERSION + "CREATE TABLE estimators (in_the_way);")
    with pytest.raises(ConfigError, match="already exists"):
        SQLiteStore(tmp_path, 8)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT tokens FROM responses").fetchall() == [(b"old.",)]


def test_retention_begins_with_the_update_of_an_old_file(
    open_store: Callable[..., SQLiteStore], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(FIRST_VERSION)
    assert open_store(retention=3600.0).count() == 1
