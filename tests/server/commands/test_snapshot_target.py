"""Dated snapshots in a folder and in a real object store: written whole or not at all, and the newest N are kept."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from histospec.server.commands.snapshot_target import DATED, dated_name
from tests.server.commands.conftest import Run
from tests.support.children import Child
from tests.support.contents import large, on_disk, restorable
from tests.support.object_store import ObjectStore, environment
from tests.support.servers import Server, Starter

OLD = [f"2026-01-0{day}T02-00-00Z.jsonl.gz" for day in (1, 2, 3)]
NOWHERE = "127.0.0.1:1"  # the snapshot is read before the service is reached
OTHERS = ["notes.txt", "2026-01-01T02-00-00Z.jsonl.gz.bak", "run.jsonl.gz"]

Place = tuple[str, Callable[[], list[str]]]
"""Where snapshots go, and a function that lists them."""


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Returns a place with some older snapshots and other files, and a function that lists all names."""
    prefix = tmp_path.name
    if request.param == "bucket":
        store: ObjectStore = request.getfixturevalue("object_store")
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        for name in (*OLD, *OTHERS):
            store.put(name, b"old", prefix)
        return f"{store.bucket}/{prefix}", lambda: store.names(prefix)
    folder = tmp_path / "backups"
    folder.mkdir()
    for name in (*OLD, *OTHERS):
        (folder / name).write_bytes(b"old")
    return str(folder), lambda: sorted(os.listdir(folder))


def test_a_snapshot_is_named_by_its_time_and_old_ones_are_removed_once_it_is_there(
    run: Run, data: Path, place: Place, tmp_path: Path,
    server: Server,
) -> None:  # fmt: skip
    where, names = place
    code, said = run("snapshot", where, "--keep", "2", "--data-dir", data)
    (new,) = set(names()) - {*OLD, *OTHERS}
    assert DATED.fullmatch(new)
    assert OLD[-1] < new <= dated_name()
    assert said.splitlines() == [
        f"{where}/{new}: 4 problems, 7 responses, 314 tokens",
        f"{where}/{OLD[0]}: removed",
        f"{where}/{OLD[1]}: removed",
    ]
    assert code == 0
    assert names() == sorted([OLD[2], *OTHERS, new])
    code, said = run("restore", where, "--to", server.endpoint)
    assert (code, said) == (0, f"{where}/{new}: 4 problems, 7 responses, 314 tokens\n")
    server.stop()
    original, copy = on_disk(tmp_path), on_disk(tmp_path, server.data_dir.name)
    assert restorable(original) == restorable(copy)
    original.close()
    copy.close()


def test_nothing_is_removed_when_nothing_was_written(run: Run, place: Place, tmp_path: Path) -> None:
    """A service that lost its volumes, or is unreachable, must not displace older snapshots."""
    where, names = place
    on_disk(tmp_path, "empty").close()
    code, said = run("snapshot", where, "--keep", "1", "--data-dir", tmp_path / "empty")
    assert (code, said) == (0, f"{where}: the store is empty, so nothing was written or removed\n")
    code, said = run("snapshot", where, "--keep", "1", "--data-dir", tmp_path / "nowhere")
    assert code == 2
    assert names() == sorted([*OLD, *OTHERS])


def test_a_clock_that_was_ahead_removes_nothing(run: Run, data: Path, tmp_path: Path) -> None:
    """Otherwise its snapshots stay the newest, and each new one is removed as soon as it is written."""
    names = [OLD[0], "2999-01-01T02-00-00Z.jsonl.gz", "2999-01-02T02-00-00Z.jsonl.gz"]
    where = tmp_path / "backups"
    where.mkdir()
    for name in names:
        (where / name).write_bytes(b"old")
    code, said = run("snapshot", where, "--keep", "2", "--data-dir", data)
    (new,) = set(os.listdir(where)) - set(names)
    assert OLD[0] < new <= dated_name()
    assert set(os.listdir(where)) == {*names, new}
    assert f"the time of {where}/{names[1]}, {where}/{names[2]} is in the future, so no older snapshot was" in said
    assert code == 1
    code, said = run("restore", where, "--to", NOWHERE)
    assert f"{where}/{names[2]}: its time is in the future, so it may not be the newest; give the full name" in said
    assert code == 2
    for name in names[1:]:
        (where / name).unlink()
    assert run("snapshot", where, "--keep", "1", "--data-dir", data)[0] == 0
    assert OLD[0] not in os.listdir(where)


def test_a_restore_of_nothing_says_so(run: Run, place: Place, tmp_path: Path) -> None:
    where, _ = place
    (tmp_path / "none").mkdir()
    nothing = f"{where}/none" if "://" in where else f"{tmp_path / 'none'}"
    code, said = run("restore", nothing, "--to", NOWHERE)
    assert code == 2
    assert f"{nothing}: has no snapshot such as 2026-11-23T02-00-00Z.jsonl.gz" in said
    code, said = run("restore", where, "--to", NOWHERE)
    assert code == 2
    assert f"{where}/{OLD[2]}: line 1: not JSON" in said


def test_one_object_may_be_named(
    run: Run, data: Path, object_store: ObjectStore, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, start_server: Starter,
) -> None:  # fmt: skip
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    for ending in ("jsonl", "jsonl.gz"):
        target = f"{object_store.bucket}/{tmp_path.name}/mine.{ending}"
        whole = f"{target}: 4 problems, 7 responses, 314 tokens\n"
        assert run("snapshot", target, "--data-dir", data) == (0, whole)
        assert run("restore", target, "--to", start_server().endpoint) == (0, whole)
    assert object_store.names(tmp_path.name) == ["mine.jsonl", "mine.jsonl.gz"]
    code, said = run("restore", f"{object_store.bucket}/{tmp_path.name}/other.jsonl", "--to", NOWHERE)
    assert code == 2
    assert "other.jsonl: NoSuchKey: The specified key does not exist; give a snapshot" in said


def test_what_cannot_be_reached_is_said_in_one_sentence(
    run: Run, data: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, said = run("snapshot", "s3://backups/x", "--data-dir", data)
    assert code == 1
    assert "SignatureDoesNotMatch" in said
    assert said.count("\n") == 1
    code, said = run("restore", "s3://backups/x", "--to", NOWHERE)
    assert code == 2
    assert said.endswith("; give the URL and the credentials of a bucket\n")
    assert "wrong" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("snapshot", "ftp://host/x"), "ftp://host/x: unknown scheme ftp://; use s3://, gs://, az:// or a file"),
        (("snapshot", "all.jsonl", "--keep", "3"), "--keep: all.jsonl is one file; give a folder or a URL"),
        (("snapshot", "s3://b/all.jsonl", "--keep", "3"), "--keep: s3://b/all.jsonl is one file"),
        (("snapshot", ".", "--keep", "0"), "--keep: must be at least 1"),
    ],
)
def test_nonsense_is_refused(run: Run, words: tuple[str, ...], said: str) -> None:
    if "s3:" in words[1]:
        pytest.importorskip("obstore", reason="needs histospec[backup]")
    code, text = run(*words)
    assert code == 2
    assert said in text


def test_the_extra_is_named_where_it_is_missing(data: Path, tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError('no module named obstore')")
    command = [sys.executable, "-m", "histospec.server", "snapshot", "s3://backups/x", "--data-dir", str(data)]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, cwd="/", env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == (
        "histospec snapshot: s3://backups/x: needs obstore (no module named obstore): pip install 'histospec[backup]'\n"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_snapshot_that_is_ended_half_way_leaves_nothing_that_a_restore_would_take(
    run: Run, place: Place, data: Path, tmp_path: Path,
    object_store: ObjectStore, number: int, server: Server,
) -> None:  # fmt: skip
    where, names = place
    long = large(tmp_path, "long")
    run("snapshot", where, "--data-dir", data)
    before = [name for name in names() if DATED.fullmatch(name)]
    assert len(before) == 4
    command = [sys.executable, "-c", SLOWLY, "snapshot", where, "--keep", "1", "--data-dir", str(long)]
    with Child(*command, cwd="/", env=environment(object_store)) as child:
        child.wait_for("half way")
        child.send_signal(number)
        assert child.end()[0] == (-number if number == signal.SIGKILL else 128 + number)
    assert [name for name in names() if DATED.fullmatch(name)] == before
    code, said = run("restore", where, "--to", server.endpoint)
    assert (code, said) == (0, f"{where}/{before[-1]}: 4 problems, 7 responses, 314 tokens\n")


# The command; it signals when it is halfway, and continues slowly.
SLOWLY = """
import sys, time
from histospec.server import cli
from histospec.server.commands import snapshot

packed = snapshot.packed

def slow(lines):
    for number, piece in enumerate(packed(lines)):
        yield piece
        if number > 20:
            print("half way", flush=True)
            time.sleep(0.2)

snapshot.packed = slow
sys.argv[0] = "histospec"
sys.exit(cli.main())
"""


def test_what_a_killed_snapshot_left_in_a_folder_is_removed_by_the_next(run: Run, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    left = folder / "2026-01-01T02-00-00Z.jsonl.gz.abc123.partial"
    for path in (left, folder / "mine.partial"):
        path.write_bytes(b"half")
    assert run("snapshot", folder, "--data-dir", data)[0] == 0
    assert left.exists(), "a snapshot that removes nothing removes nothing"
    assert run("snapshot", folder, "--keep", "9", "--data-dir", data)[0] == 0
    assert not left.exists()
    assert (folder / "mine.partial").exists()


def test_a_dated_snapshot_is_for_its_owner_alone_and_can_be_replayed(run: Run, data: Path, tmp_path: Path) -> None:
    run("snapshot", f"{tmp_path}/", "--data-dir", data)
    (file,) = tmp_path.glob("*.jsonl.gz")
    assert file.stat().st_mode & 0o777 == 0o600
    code, said = run("replay", file, "--no-plot", "--json", "-")
    assert code == 0
    assert '"problems": 4' in said
