"""A damaged SQLite file: readable data remains, unreadable data is counted, and the file is set aside."""

import hashlib
import random
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from histospec.server import cli
from histospec.server.commands.lines import decoded
from histospec.server.errors import StoreError
from histospec.server.stores.interface import Problem, Record, ResponseBatch
from histospec.server.stores.sqlite import damage as sqlite_damage
from histospec.server.stores.sqlite import store as sqlite_store
from histospec.server.stores.sqlite import structure
from histospec.server.stores.sqlite.file import FILE_NAME
from histospec.server.stores.sqlite.reader import SQLiteSnapshot
from histospec.server.stores.sqlite.store import SQLiteStore
from histospec.server.stores.sqlite.structure import StructureCheck
from tests.support.batches import put
from tests.support.contents import to_load
from tests.support.waiting import Latch, eventually

PAGE = 4096
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
PROBLEMS, EACH = 40, 3


def prompt(number: int) -> bytes:
    return np.array([number, 1], "<i4").tobytes()


def fill(directory: Path) -> bytes:
    """Stores 120 responses. Returns the bytes of the file."""
    store = SQLiteStore(directory, 8)
    rng = np.random.default_rng(0)
    for number in range(PROBLEMS):
        responses = rng.integers(0, 50_000, (EACH, 400)).astype("<i4")
        store.append(
            ResponseBatch(Problem("run", prompt(number)), [Record(r.tobytes(), number % 4) for r in responses])
        )
    store.save_estimator("run", bytes(50_000)).result()
    store.close()
    return (directory / FILE_NAME).read_bytes()


def one_bit(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(PAGE, len(data))] ^= 1 << rng.randrange(8)


def many_bytes(rng: random.Random, data: bytearray) -> None:
    for _ in range(30):
        data[rng.randrange(PAGE, len(data))] = rng.randrange(256)


def page_of(make: Callable[[random.Random], bytes]) -> Callable[[random.Random, bytearray], None]:
    def fault(rng: random.Random, data: bytearray) -> None:
        at = rng.randrange(1, len(data) // PAGE) * PAGE
        data[at : at + PAGE] = make(rng)

    return fault


FAULTS = {
    "bit": one_bit,
    "bytes": many_bytes,
    "zeros": page_of(lambda rng: bytes(PAGE)),
    "noise": page_of(lambda rng: rng.randbytes(PAGE)),
}


def aside(directory: Path) -> list[Path]:
    """Returns the damaged files that were set aside."""
    return [
        path for path in directory.glob(f"{FILE_NAME}.damaged-*") if not path.name.endswith(("-wal", "-shm", ".lost"))
    ]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_store_opens_whatever_is_damaged_and_counts_what_is_lost(tmp_path: Path, kind: str) -> None:
    whole = fill(tmp_path)
    rng = random.Random(kind)
    kept = {(r.tokens, b.problem.prompt) for b in loaded(tmp_path) for r in b.records}
    for number in range(25):
        data = bytearray(whole)
        FAULTS[kind](rng, data)
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / FILE_NAME).write_bytes(data)
        store = SQLiteStore(directory, 8)
        assert store.newest_epochs().get("run", 3) >= 0
        store.estimators()
        found = [(r.tokens, b.problem.prompt) for b in to_load(store) for r in b.records]
        assert kept.issuperset(found)
        counted = len(found) + store.damaged_responses
        assert counted == PROBLEMS * EACH or (kind == "bytes" and counted > 0.8 * PROBLEMS * EACH)
        put(store, b"next", prompt=b"another.")
        assert all(path.read_bytes() == data for path in aside(directory))
        store.close()
        store = SQLiteStore(directory, 8)
        again = len([r for b in to_load(store) for r in b.records])
        assert again == len(found) + 1 or (kind == "bytes" and again > len(found))  # a repair may find more
        store.close()


def test_a_damaged_schema_keeps_no_server_from_starting(tmp_path: Path) -> None:
    """The number of responses may be lost together with the schema."""
    whole = fill(tmp_path)
    rng = random.Random(1)
    read = 0
    for number in range(15):
        data = bytearray(whole)
        for _ in range(number % 3 + 1):
            data[rng.randrange(2500, PAGE)] = rng.randrange(256)
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / FILE_NAME).write_bytes(data)
        store = SQLiteStore(directory, 8)
        read += sum(len(b.records) for b in to_load(store))
        put(store, b"next", prompt=b"another.")
        assert all(path.read_bytes() == data for path in aside(directory))
        store.close()
    assert read > 3 * PROBLEMS * EACH


def loaded(directory: Path) -> list[ResponseBatch]:
    store = SQLiteStore(directory, 8)
    try:
        return list(to_load(store))
    finally:
        store.close()


def test_a_flipped_bit_in_a_response_is_found_when_it_is_read(tmp_path: Path) -> None:
    whole = bytearray(fill(tmp_path))
    victim = np.random.default_rng(0).integers(0, 50_000, (EACH, 400)).astype("<i4")[1].tobytes()
    whole[whole.index(victim[400:600]) + 7] ^= 4
    (tmp_path / FILE_NAME).write_bytes(whole)
    store = SQLiteStore(tmp_path, 8)
    assert sum(len(b.records) for b in to_load(store)) == PROBLEMS * EACH - 1
    assert len(store.history(Problem("run", prompt(0)))) == EACH - 1
    assert store.damaged_responses == 1  # counted once, however often it is read
    assert aside(tmp_path) == []
    store.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", "CAST(tokens AS TEXT)"), ("epoch", "'three'"), ("epoch", "epoch + 1"), ("reward", "0.25"),
        ("logprobs", "zeroblob(4)"), ("generated", "zeroblob(1)"), ("seed", "5"), ("prompt", "prompt + 1"),
        ("checksum", "checksum + 1"), ("alternatives", "zeroblob(1)"),
    ],
)  # fmt: skip
def test_every_column_is_covered_by_the_checksum(tmp_path: Path, column: str, value: str) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute(f"UPDATE responses SET {column} = {value} WHERE id = 5")
    store = SQLiteStore(tmp_path, 8)
    assert sum(len(b.records) for b in to_load(store)) == PROBLEMS * EACH - 1
    assert store.damaged_responses == 1
    store.close()


def test_a_damaged_prompt_takes_its_responses_with_it(tmp_path: Path) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE prompts SET tokens = zeroblob(8) WHERE id = 1")
    store = SQLiteStore(tmp_path, 8)
    assert sum(len(b.records) for b in to_load(store)) == PROBLEMS * EACH - EACH
    assert sum(len(records) for _, records in store.problems("run")) == PROBLEMS * EACH - EACH
    assert store.damaged_responses == EACH
    store.close()


def test_damage_that_is_met_while_writing_moves_the_store_to_a_new_file(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path, 8)
    put(store, b"kept")
    store.submit(lambda _: None).result()  # after the check at the start
    met: list[int] = []

    def meet(connection: sqlite3.Connection) -> None:
        if not met:
            met.append(1)
            raise sqlite3.DatabaseError("database disk image is malformed")

    inode = (tmp_path / FILE_NAME).stat().st_ino
    store.submit(meet).result()
    put(store, b"next")
    assert [r.tokens for r in store.history(Problem("run", b"prompt.."))] == [b"kept", b"next"]
    assert (tmp_path / FILE_NAME).stat().st_ino != inode
    assert [path.stat().st_ino for path in aside(tmp_path)] == [inode]
    store.close()


def test_a_disk_that_damages_every_file_is_given_up(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path, 8)

    def meet(connection: sqlite3.Connection) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    with pytest.raises(StoreError, match="malformed"):
        store.submit(meet).result()
    assert len(aside(tmp_path)) == 3
    store.close()


def test_a_damaged_file_with_a_write_ahead_log_is_not_written_to(tmp_path: Path) -> None:
    """Leaves files as a killed server does."""
    whole = bytearray(fill(tmp_path / "first"))
    store = SQLiteStore(tmp_path / "first", 8)
    put(store, b"last", prompt=b"in the log..")
    log = (tmp_path / "first" / f"{FILE_NAME}-wal").read_bytes()
    store.close()
    whole[20 * PAGE : 21 * PAGE] = random.Random(0).randbytes(PAGE)
    data = tmp_path / "second"
    data.mkdir()
    (data / FILE_NAME).write_bytes(whole)
    (data / f"{FILE_NAME}-wal").write_bytes(log)
    store = SQLiteStore(data, 8)
    found = [r.tokens for b in to_load(store) for r in b.records]
    assert b"last" in found
    assert len(found) + store.damaged_responses == PROBLEMS * EACH + 1
    store.close()
    (damaged,) = aside(data)
    assert hashlib.sha256(damaged.read_bytes()).digest() == hashlib.sha256(whole).digest()
    assert damaged.with_name(f"{damaged.name}-wal").read_bytes() == log


@pytest.mark.parametrize("at", ["rename", "unlink"])
def test_a_crash_while_a_file_is_replaced_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """
    1. The server ends when the salvaged copy is complete and the damaged file is still in place, or already set aside.
    2. The next start has everything.
    """
    whole = bytearray(fill(tmp_path))
    whole[20 * PAGE : 21 * PAGE] = random.Random(0).randbytes(PAGE)
    (tmp_path / FILE_NAME).write_bytes(whole)

    class Crash(BaseException):
        pass

    path = type(tmp_path)
    original = getattr(path, at)

    def crash(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == (FILE_NAME if at == "rename" else f"{FILE_NAME}-shm"):
            raise Crash
        return original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(path, at, crash)
        with pytest.raises(Crash):
            sqlite_damage.replace(tmp_path / FILE_NAME, None, "a test")
    assert (tmp_path / FILE_NAME).exists() == (at == "rename")
    store = SQLiteStore(tmp_path, 8)
    found = sum(len(b.records) for b in to_load(store))
    assert 0 < PROBLEMS * EACH - found < 10
    store.close()


def test_a_snapshot_of_a_damaged_store_has_what_can_be_read_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HISTOSPEC_STORE", raising=False)
    whole = bytearray(fill(tmp_path))
    whole[20 * PAGE : 21 * PAGE] = random.Random(0).randbytes(PAGE)
    (tmp_path / FILE_NAME).write_bytes(whole)
    file = tmp_path / "all.jsonl"
    assert cli.main(["snapshot", str(file), "--data-dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "responses of the store are damaged and left out" in err
    assert (tmp_path / FILE_NAME).read_bytes() == whole
    reader = SQLiteSnapshot(tmp_path)
    left = sum(len(records) for _, records in reader.problems("run"))
    assert left + reader.damaged_responses == PROBLEMS * EACH
    assert 0 < reader.damaged_responses < 10
    assert f"{left} responses" in out
    reader.close()
    with file.open("rb") as lines:
        assert sum(len(stored.records) for stored in decoded(lines, "*")) == left


def test_where_there_is_no_room_for_all_the_newest_are_salvaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bytearray(fill(tmp_path))
    whole[60 * PAGE : 61 * PAGE] = bytes(PAGE)
    (tmp_path / FILE_NAME).write_bytes(whole)
    monkeypatch.setattr(sqlite_damage, "COMMIT_BYTES", 10_000)
    result = sqlite_damage.salvage(tmp_path / FILE_NAME, tmp_path / "copy", 200 << 10)
    assert result.full
    assert result.exact
    assert result.responses + result.lost == PROBLEMS * EACH
    with sqlite3.connect(tmp_path / "copy") as copy:
        assert copy.execute("SELECT max(id) FROM responses").fetchone() == (PROBLEMS * EACH,)
        assert 0 < copy.execute("SELECT count(*) FROM responses").fetchone()[0] < PROBLEMS * EACH


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as too large to be checked before the first write."""
    monkeypatch.setattr(sqlite_store, "SMALL", -1)


def damaged_where_nobody_reads(directory: Path) -> bytes:
    """Leaves a store with a page that nothing refers to. Returns the bytes of the file."""
    whole = bytearray(fill(directory))
    pages = len(whole) // PAGE
    whole[28:32] = (pages + 1).to_bytes(4, "big")
    whole += bytes(PAGE)
    (directory / FILE_NAME).write_bytes(whole)
    return bytes(whole)


def test_the_structure_of_a_large_file_is_looked_through_while_it_is_in_use(tmp_path: Path, large: None) -> None:
    """
    1. The file is damaged in a place without responses, so no read meets the damage.
    2. The store opens and accepts responses before the check.
    3. The check finds the damage; a new file has everything, including later responses.
    """
    whole = damaged_where_nobody_reads(tmp_path)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"next", prompt=b"another.")
    assert sum(len(b.records) for b in to_load(store)) == PROBLEMS * EACH + 1
    assert aside(tmp_path) == []
    store.look_for_damage()
    eventually(lambda: aside(tmp_path), "the damage is not found")
    put(store, b"last", prompt=b"another.")
    assert sum(len(b.records) for b in to_load(store)) == PROBLEMS * EACH + 2
    assert store.damaged_responses == 0
    assert [path.read_bytes() for path in aside(tmp_path)] == [whole]  # the rest is in its write-ahead log
    store.close()


def test_a_small_file_is_looked_through_before_anything_is_written_to_it(tmp_path: Path) -> None:
    whole = damaged_where_nobody_reads(tmp_path)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"next", prompt=b"another.")
    (damaged,) = aside(tmp_path)
    assert damaged.read_bytes() == whole
    assert sum(len(b.records) for b in to_load(store)) == PROBLEMS * EACH + 1
    store.close()


@pytest.mark.parametrize("why", ["the server ends", "much is written"])
def test_a_look_that_is_cut_short_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: None, why: str
) -> None:
    """SQLite reports pages as unused that it did not reach."""
    looking = Latch()

    def interrupted(connection: sqlite3.Connection) -> str:
        looking.set()
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            connection.execute(ENDLESS).fetchone()
        return "malformed: Page 7 is never used"

    monkeypatch.setattr(structure, "structural_damage", interrupted)
    monkeypatch.setattr(structure, "LOG_CHECK_SECONDS", 0.01)
    if why == "much is written":
        monkeypatch.setattr(structure, "LOG_BYTES", 0)
    fill(tmp_path)
    store = SQLiteStore(tmp_path, 8)
    put(store, b"next")
    with capture_logs() as logs:
        store.look_for_damage()
        looking.wait()
        if why == "much is written":
            eventually(lambda: logs, "it looks on")
        store.close()
    assert [line["event"] for line in logs] == (
        ["the structure of the store is not checked to the end"] if why == "much is written" else []
    )
    assert aside(tmp_path) == []
    assert sum(len(b.records) for b in loaded(tmp_path)) == PROBLEMS * EACH + 1


def test_a_look_ends_that_was_cut_short_before_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite ignores an interrupt between two statements."""
    looking, interrupted = Latch(), Latch()

    class Connection(sqlite3.Connection):
        def interrupt(self) -> None:
            super().interrupt()
            interrupted.set()

    def late(connection: sqlite3.Connection) -> str:
        looking.set()
        interrupted.wait()
        connection.execute(ENDLESS).fetchone()
        return ""

    monkeypatch.setattr(structure, "structural_damage", late)
    check = StructureCheck(
        tmp_path / FILE_NAME, lambda _: sqlite3.connect(":memory:", factory=Connection, check_same_thread=False)
    )
    check.start(lambda reason: None)
    looking.wait()
    check.close()


def test_a_store_that_is_closed_while_it_is_looked_through_is_whole(tmp_path: Path, large: None) -> None:
    fill(tmp_path)
    for _ in range(20):
        store = SQLiteStore(tmp_path, 8)
        store.look_for_damage()
        store.close()
    assert aside(tmp_path) == []


def test_many_read_side_by_side_while_the_file_is_replaced(tmp_path: Path) -> None:
    """Damage that several threads meet at once makes one new file, which all of them read."""
    whole = bytearray(fill(tmp_path))
    store = SQLiteStore(tmp_path, 8)
    store.submit(lambda _: None).result()  # after the check at the start
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'prompts_by_digest'").fetchone()
    whole[(root - 1) * PAGE : root * PAGE] = random.Random(0).randbytes(PAGE)
    with (tmp_path / FILE_NAME).open("r+b") as file:  # the same file, like a failing disk
        file.write(whole)
    with ThreadPoolExecutor(8) as threads:
        problems = [Problem("run", prompt(number)) for number in range(PROBLEMS)]
        found = list(threads.map(store.history, problems))
    assert [len(records) for records in found] == [EACH] * PROBLEMS
    assert len(aside(tmp_path)) == 1
    store.close()
