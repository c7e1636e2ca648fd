"""A plain snapshot that was cut or changed is refused, as a gzipped one is."""

import io
import json
import random
from pathlib import Path

import pytest

from histospec.replay.recordings import RecordingError, read
from histospec.server.commands.lines import Stored, decoded, encoded
from histospec.server.stores.interface import Problem, Record
from tests.server.commands.conftest import Run
from tests.support.contents import fill, on_disk, tokens


def snapshot(problems: int = 12, namespace: str = "run") -> bytes:
    stored = [
        Stored(Problem(namespace, tokens(number, 7)), [Record(tokens(*range(number + 1)), number, 0.5, seed=number)])
        for number in range(problems)
    ]
    return b"".join(encoded(stored))


def restored(data: bytes) -> int:
    """Returns the number of problems. Raises RecordingError."""
    return len(list(decoded(io.BytesIO(data), "*")))


@pytest.mark.parametrize("problems", [1, 2, 12])
def test_every_flip_is_found(problems: int) -> None:
    whole = snapshot(problems)
    assert restored(whole) == problems
    for number in random.Random(problems).sample(range(8 * len(whole)), min(8 * len(whole), 1500)):
        data = bytearray(whole)
        data[number // 8] ^= 1 << number % 8
        with pytest.raises(RecordingError):
            restored(bytes(data))


def test_every_missing_line_is_found() -> None:
    lines = snapshot().splitlines(keepends=True)
    for first in range(len(lines)):
        for end in range(first + 1, len(lines) + 1):
            if end - first < len(lines):
                with pytest.raises(RecordingError, match="are missing"):
                    restored(b"".join(lines[first:end]))
                with pytest.raises(RecordingError, match=r"are missing|is empty"):
                    restored(b"".join(lines[:first] + lines[end:]))
    with pytest.raises(RecordingError, match="some are missing or were changed"):
        restored(b"".join([lines[1], lines[0], *lines[2:]]))


def test_several_snapshots_make_one_file() -> None:
    assert restored(snapshot() + snapshot(3, "other")) == 15
    with pytest.raises(RecordingError, match="after line 12: the last lines are missing"):
        restored(snapshot(3) + b"".join(snapshot(10, "other").splitlines(keepends=True)[:-1]))


def test_a_file_of_another_program_needs_no_seal() -> None:
    line = {"namespace": "run", "prompt": [1], "responses": [{"epoch": 0, "tokens": [1]}]}
    assert restored(json.dumps(line).encode()) == 1


def test_replay_reads_a_sealed_file() -> None:
    assert len(list(read(io.BytesIO(snapshot())))) == 12


def test_a_cut_snapshot_is_refused_before_anything_is_restored(run: Run, tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    fill(store)
    store.close()
    file = tmp_path / "all.jsonl"
    run("snapshot", file, "--data-dir", tmp_path / "data")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    code, output = run("restore", file, "--to", "127.0.0.1:1")  # the file is checked first
    assert code == 2
    assert f"after line {len(lines) - 1}: the last lines are missing; copy the file again" in output
