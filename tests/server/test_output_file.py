"""Files that commands write: errors come before the work, and a name never holds half a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from histospec.replay.plot import FORMATS
from histospec.server import cli
from histospec.server.errors import ConfigError, reason
from histospec.server.output_file import OutputError, keep_apart, written


def write(name: object, **options: bool) -> None:
    with written(str(name), **options) as file:
        file.write(b"new")


def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(TypeError), written(str(file)) as opened:
        opened.writelines([b"half" * 100_000, None])  # type: ignore[list-item]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"old"
    write(file)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"new"


def test_a_new_file_is_for_those_that_new_files_are_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "open")
        write(tmp_path / "private", private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_what_is_no_file_is_left_alone_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("absent")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "dangling", "fifo", "/dev/null", "/dev/full", ".", "absent/file", "/proc/file"):
        with pytest.raises(ConfigError, match=f"{name}|{tmp_path}"):
            write(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "fifo", "link", "target"]
    assert (tmp_path / "target").read_bytes() == b"old"
    for name in ("link", "dangling", "/dev/null"):
        write(tmp_path / name, force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == (tmp_path / "absent").read_bytes() == b"new"
    assert os.path.exists("/dev/null")
    assert not os.path.isfile("/dev/null")
    with pytest.raises(ConfigError, match="is a directory"):
        write(tmp_path, force=True)
    with pytest.raises(OutputError, match="/dev/full: no space left on device"):
        write("/dev/full", force=True)


def test_a_pipe_that_is_forced_gets_what_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cat", tmp_path / "fifo"], stdout=subprocess.PIPE) as reader:
        write(tmp_path / "fifo", force=True)
        assert reader.communicate(timeout=60)[0] == b"new"


def test_a_descriptor_that_was_inherited_is_written_to() -> None:
    ends = os.pipe()
    write(f"/dev/fd/{ends[1]}")
    assert os.read(ends[0], 10) == b"new"
    for end in ends:
        os.close(end)


def test_a_database_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "data.sqlite").write_bytes(b"SQLite format 3\0...")
    with pytest.raises(ConfigError, match="is a database"):
        write(tmp_path / "data.sqlite", force=True)


@pytest.mark.parametrize("words", [["snapshot", "/dev/stdout", "--data-dir", "absent"], ["replay", "/dev/stdin"]])
def test_names_of_the_standard_streams_are_no_symlinks_to_refuse(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "histospec.server", *words]
    done = subprocess.run(command, cwd=tmp_path, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "symlink" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--plot", "x.unknown"], "--plot x.unknown: unknown plot format 'unknown'; use png, pdf,"),
        (["--plot", "absent/x.png"], "absent/x.png: cannot make a file in this folder"),
        (["--plot", "/dev/null"], "/dev/null is a device or a pipe; give the name of a file, or --force"),
        (["--json", "absent/x.json"], "absent/x.json: cannot make a file in this folder"),
        (["--json", "."], ". is a directory"),
        (["--json", "-", "--plot", "-"], "--json and --plot both write to standard output"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_recording_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["replay", "absent.jsonl", *flags]) == 2
    text = capsys.readouterr().err
    assert sentence in text
    assert text.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("replay in.jsonl --json in.jsonl", "replay: --json in.jsonl is the file that FILE reads; give the name of"),
        ("replay other.jsonl in.jsonl --no-plot --json ./in.jsonl", "--json ./in.jsonl is the file that FILE reads"),
        ("replay in.jsonl --force --json link", "--json link is the file that FILE reads"),
        ("replay link --json in.jsonl", "--json in.jsonl is the file that FILE reads"),
        ("replay - --json in.jsonl", "--json in.jsonl is the file that FILE reads"),
        ("replay in.png --plot in.png", "--plot in.png is the file that FILE reads"),
        ("replay in.jsonl --json new.png --plot ./new.png", "--json and --plot both write to ./new.png; give one of"),
        ("replay in.jsonl --json other.png --plot other.png", "--json and --plot both write to other.png"),
        ("bench nowhere:9 --rollouts in.jsonl --json in.jsonl", "--json in.jsonl is the file that --rollouts reads"),
        ("bench nowhere:9 --tls-ca in.jsonl --json in.jsonl", "--json in.jsonl is the file that --tls-ca reads"),
        ("bench nowhere:9 --json token", "--json token is the file that HISTOSPEC_TOKEN_FILE reads"),
        ("snapshot in.jsonl --config in.jsonl", "snapshot: TARGET in.jsonl is the file that --config reads"),
        ("snapshot in.jsonl --store-file in.jsonl", "TARGET in.jsonl is the file that --store-file reads"),
        ("snapshot token --from nowhere:9", "TARGET token is the file that HISTOSPEC_TOKEN_FILE reads"),
    ],
)
def test_what_a_command_reads_is_not_written_over(words: str, sentence: str, tmp_path: Path) -> None:
    for name in ("in.jsonl", "other.jsonl", "in.png", "other.png", "token"):
        (tmp_path / name).write_text('{"prompt": [1], "responses": [{"epoch": 0, "tokens": [1]}]}\n')
    (tmp_path / "link").symlink_to("in.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    command = [sys.executable, "-m", "histospec.server", *words.split()]
    environment = os.environ | {"HISTOSPEC_TOKEN_FILE": "token"}
    with (tmp_path / "in.jsonl").open() as file:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdin=file, capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_standard_output_appends_to_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    command = [sys.executable, "-m", "histospec.server", "replay", "in.jsonl", "--no-plot", "--json", "-"]
    with (tmp_path / "in.jsonl").open("a") as file:
        done = subprocess.run(command, cwd=tmp_path, stdout=file, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, (tmp_path / "in.jsonl").read_text()) == (2, "{}\n")
    assert "--json - is the file that FILE reads" in done.stderr


def test_devices_and_pipes_may_be_read_and_written() -> None:
    ends = os.pipe()
    keep_apart([("--json", "/dev/null"), ("--plot", "/dev/null")], [("FILE", "/dev/null")])
    keep_apart([("--json", f"/dev/fd/{ends[1]}"), ("--plot", None)], [("FILE", f"/dev/fd/{ends[0]}")])
    for end in ends:
        os.close(end)


def test_a_reason_that_names_a_variable_keeps_its_letters() -> None:
    assert reason(OSError("set the MPLCONFIGDIR environment variable")) == "set the MPLCONFIGDIR environment variable"
    assert reason(PermissionError(13, "Permission denied")) == "permission denied"


def test_every_format_of_a_plot_is_known_to_matplotlib() -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    assert set(FORMATS) <= set(FigureCanvasBase.get_supported_filetypes())
