"""Files that change: whatever happens between two checks, the contents on disk come into force."""

import os
from pathlib import Path

import pytest

from histospec.server.security.watched_files import SETTLED_NS, Watched, _State

LONG_AGO = 10**9  # seconds


class Reader:
    """Reads a file, unless it may not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.denied = False
        self.reads = 0

    def __call__(self) -> str:
        self.reads += 1
        if self.denied:
            raise PermissionError("permission denied")
        return self.path.read_text()


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    (tmp_path / "file").write_text("old")
    return Reader(tmp_path / "file")


def test_what_could_not_be_read_is_tried_at_every_look(reader: Reader) -> None:
    """The file is read again, although nothing about it changes."""
    watched = Watched("tokens", [reader.path], reader)
    reader.path.write_text("new")
    reader.denied = True
    assert [watched.look() for _ in range(3)] == ["old"] * 3
    assert reader.reads == 4
    assert watched.failure == "permission denied"
    assert watched.version == 0
    reader.denied = False
    assert watched.look() == "new"
    assert watched.failure == ""
    assert watched.version == 1


def test_a_file_that_went_is_missed_and_found_again(reader: Reader) -> None:
    watched = Watched("tokens", [reader.path], reader)
    reader.path.unlink()
    assert watched.look() == "old"
    assert "No such file" in watched.failure
    reader.path.write_text("old")
    assert watched.look() == "old"
    assert (watched.failure, watched.version) == ("", 0)


def test_a_change_that_keeps_size_and_times_is_seen(reader: Reader) -> None:
    """`cp -p` and `touch -r` keep the times: the last change of the inode shows it."""
    os.utime(reader.path, (LONG_AGO, LONG_AGO))
    watched = Watched("tokens", [reader.path], reader)
    watched.look()
    with reader.path.open("r+") as file:
        file.write("new")
    os.utime(reader.path, (LONG_AGO, LONG_AGO))
    assert watched.look() == "new"


def test_a_change_within_one_tick_of_the_clock_is_seen(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has just changed may change again without a sign; an older one is not read again."""
    now, elapsed = 10**18, 0
    monkeypatch.setattr("histospec.server.security.watched_files._state", lambda path: _State(1, 3, now, now))
    monkeypatch.setattr("histospec.server.security.watched_files.time.time_ns", lambda: now + elapsed)
    watched = Watched("tokens", [reader.path], reader)
    watched.look()
    reader.path.write_text("new")
    assert watched.look() == "new"
    elapsed = 2 * SETTLED_NS
    watched.look()
    before = reader.reads
    watched.look()
    assert reader.reads == before
