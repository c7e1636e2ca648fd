"""Retention: old problems are deleted, but none while the clock may have jumped."""

import time
from pathlib import Path

import pytest

from histospec.server import cli
from histospec.server.stores.sqlite.retention import A_FEW, Clock, Trust
from histospec.server.stores.sqlite.store import SQLiteStore
from tests.server.stores.conftest import OpenSQLite
from tests.support.ages import forgotten_down_to
from tests.support.batches import batch, put
from tests.support.contents import rows
from tests.support.waiting import eventually

DAY = 86_400.0


class Clocks:
    """A wall clock and a monotonic clock."""

    def __init__(self) -> None:
        self.day = 1e9
        self.steady = 5.0

    def clock(self, before: Trust | None = None, newest: float | None = None) -> Clock:
        return Clock(30 * DAY, before, newest, lambda: self.day, lambda: self.steady)

    def pass_(self, seconds: float) -> None:
        self.day += seconds
        self.steady += seconds


def test_a_clock_that_goes_on_evenly_vouches_for_all_times_since_the_first_look() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clocks.pass_(90 * DAY)
    assert clock.tick() == Trust(1e9 + 90 * DAY, 1e9)
    clocks.pass_(60)  # a restart
    assert clocks.clock(clock.trust).tick() == Trust(1e9 + 90 * DAY + 60, 1e9)


@pytest.mark.parametrize(("jump", "says"), [(2 * DAY, "forward by 2.0 days"), (-7800, "back by 2.0 hours")])
def test_a_jump_pauses_until_a_person_says_that_the_clock_is_right(jump: float, says: str) -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clocks.day += 600  # a harmless correction
    assert not clock.tick().paused
    clocks.day += jump
    assert says in clock.tick().paused
    assert clock.trust.since == clocks.day
    clocks.pass_(DAY)
    assert says in clock.tick().paused
    assert says in clocks.clock(clock.trust).tick().paused  # a restart does not end it
    clock.resume()
    clocks.pass_(DAY)
    assert not clock.tick().paused


def test_many_small_corrections_are_a_jump() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    for _ in range(100):
        clocks.pass_(10)
        clocks.day += 60
    assert clock.tick().paused


def test_a_start_before_what_was_seen_already_pauses() -> None:
    clocks = Clocks()
    assert "the time of day is 2.0 days before" in clocks.clock(Trust(1e9 + 2 * DAY, 0.0)).trust.paused
    assert "the time of day is 2.0 days before" in clocks.clock(None, 1e9 + 2 * DAY).trust.paused
    assert not clocks.clock(Trust(1e9 - 60, 0.0), 1e9 - 60).trust.paused


def test_after_a_long_silence_only_a_few_doubtful_problems_are_forgotten() -> None:
    clocks = Clocks()
    clock = clocks.clock(Trust(1e9 - 2 * DAY, 0.0))
    assert clock.trust.since == 1e9
    assert not clock.judge(A_FEW).paused
    assert "11 problems look old at once, after 0 in the last hour" in clock.judge(A_FEW + 1).paused


def test_what_was_forgotten_in_the_last_hour_says_how_many_are_usual() -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clock.forgot(20)
    clock.tick()
    assert not clock.judge(200).paused
    after = clocks.clock(clock.trust)
    after.tick()
    assert not after.judge(200).paused
    clocks.pass_(3601)
    after.tick()
    assert after.judge(200).paused


def fill(store: SQLiteStore, problems: int, ago: float) -> None:
    """Makes problems look as if they were written that long ago."""
    for number in range(problems):
        store.append(batch(b"aaaa", prompt=number.to_bytes(4, "big")))
    put(store, b"next", prompt=b"another.")
    update = "UPDATE writes SET latest = latest - ?"
    store.submit(lambda connection: connection.execute(update, (ago,))).result()


def test_much_that_looks_old_at_once_stays_until_a_person_forgets_it(
    open_store: OpenSQLite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store()
    fill(store, 30, 100.0)
    store.close()
    store = open_store(retention=60.0)
    eventually(lambda: store.retention_paused, "retention does not pause")
    assert "31 problems look old at once" in store.retention_paused
    store.close()
    store = open_store(retention=60.0)
    eventually(lambda: store.retention_paused, "a restart ends the pause")
    put(store, b"next", prompt=b"another.")
    assert store.count() == 32

    forget = ["forget", "--data-dir", str(tmp_path), "--older-than"]
    assert cli.main([*forget, str(60 / DAY), "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("30 prompts would be forgotten\n")
    assert store.count() == 32
    assert cli.main([*forget, f"{60 / DAY}d"]) == 0
    assert "30 prompts forgotten; a paused retention continues\n" in capsys.readouterr().out
    assert store.count() == 2
    eventually(lambda: not store.retention_paused, "retention does not go on")
    put(store, b"last", prompt=bytes(4))  # the store knows that this problem's responses are gone
    assert store.count() == 3


def test_a_problem_that_comes_back_after_it_was_forgotten_keeps_all_that_is_new(
    open_store: OpenSQLite,
) -> None:
    store = open_store(retention=20.0)
    for epoch in range(8):  # as many as the store keeps
        put(store, b"old.", epoch)
    age = "UPDATE writes SET latest = latest - 100"
    store.submit(lambda connection: connection.execute(age)).result()
    assert forgotten_down_to(store, 0)
    for epoch in range(8, 12):
        put(store, b"new.", epoch)
    assert store.count() == 4


def test_a_time_of_day_that_went_back_between_two_starts_pauses(open_store: OpenSQLite) -> None:
    store = open_store(retention=60.0)
    store.close()
    store = open_store()
    ahead = "UPDATE clock SET seen = seen + 1000"
    store.submit(lambda connection: connection.execute(ahead)).result()
    store.close()
    store = open_store(retention=60.0)
    eventually(lambda: "before what a server has seen" in store.retention_paused, "retention does not pause")


def test_a_jump_while_the_server_runs_pauses(
    open_store: OpenSQLite,
) -> None:
    ahead = 0.0
    store = open_store(retention=60.0, wall=lambda: time.time() + ahead)
    fill(store, 3, 0.0)
    eventually(lambda: rows(store, "SELECT * FROM clock"), "the clock is not noted")
    ahead = 1000.0
    eventually(lambda: "jumped forward by 0.3 hours" in store.retention_paused, "retention does not pause")
    assert store.count() == 4


@pytest.mark.parametrize("text", ["", "30x", "-1", "nan", "1e9"])
def test_a_wrong_age_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert cli.main(["forget", "--data-dir", str(tmp_path), f"--older-than={text}"]) == 2
    assert "--older-than" in capsys.readouterr().err


def test_there_must_be_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["forget", "--data-dir", str(tmp_path), "--older-than", "3"]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert cli.main(["forget", "--store", "redis://127.0.0.1:1", "--older-than", "3"]) == 2
    assert "Redis deletes problems when their keys expire" in capsys.readouterr().err
