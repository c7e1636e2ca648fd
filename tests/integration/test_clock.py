"""The wall clock of a shard jumps: nothing hangs, nothing is lost, and the history keeps the order of epochs."""

import json
import os
import urllib.request
from pathlib import Path

import pytest

from histospec.client import DraftClient
from tests.support.children import histospec
from tests.support.rollouts import TEXT, Drafted
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually
from tests.support.wires import Connector

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class Clock:
    """The wall clock of a process, set through a file."""

    def __init__(self, file: Path) -> None:
        if LIBRARY is None:
            pytest.skip("faketime is not installed (scripts/install-tools does it on Debian)")
        self._file = file
        self.jump("+0d")
        self.env = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, offset: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(offset)
        os.replace(new, self._file)


def day_of(server: Server) -> str:
    """Returns the date by the server's clock, from its HTTP answer."""
    with urllib.request.urlopen(f"http://{server.http}/livez", timeout=10) as answer:
        return str(answer.headers["Date"])[:16]


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_clock_that_jumps_changes_nothing(
    start_server: Starter, tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("redis_server").url if store == "redis" else store
    clock = Clock(tmp_path / "clock")
    server = start_server("--store", url, "--history-epochs", "100000", env=clock.env)
    days = {day_of(server)}
    with DraftClient(server.endpoint, namespace="run", deadline=10.0) as client:
        worker = Drafted(client)
        worker.goes_on()
        for offset in ("+1d", "-1d", "+0d"):
            clock.jump(offset)
            worker.goes_on()
            days.add(day_of(server))
        worker.stop()
        stats = client.stats()
        assert (stats.failed, stats.late, stats.pending_commits, stats.dropped_commits) == (0, 0, 0, 0)
        assert stats.commits == worker.rollouts
        assert worker.undrafted == 0
        expected = [(epoch, [*TEXT, epoch]) for epoch in range(worker.rollouts)]
        assert [(r.epoch, list(r.tokens)) for r in client.history([1, 2, 3])] == expected
        server.drain()  # not killed: faketime would leave its shared memory behind
        server.start()
        assert [(r.epoch, list(r.tokens)) for r in client.history([1, 2, 3])] == expected
    server.drain()
    assert len(days) == 3  # otherwise the clock has not moved


def test_a_clock_that_jumps_beyond_the_retention_forgets_nothing(
    start_server: Starter, connect: Connector, tmp_path: Path
) -> None:
    """
    1. The clock jumps by more than the retention: nothing is deleted, and metric, status and log say so.
    2. The same after a restart, and when the clock is right again.
    3. `histospec forget` ends the pause beside the running server, and deletes nothing new.
    """
    clock = Clock(tmp_path / "clock")
    server = start_server("--retention", "1", env=clock.env)
    wire = connect(server.endpoint)
    for number in range(30):
        wire.ingest([number, 1], [[1, 2, 3]])

    def paused() -> bool:
        return server.metrics()["histospec_retention_paused"] == 1

    def everything() -> bool:
        return all(wire.history([number, 1], wait=True) == [[1, 2, 3]] for number in range(30))

    clock.jump("+3d")
    eventually(paused, "retention does not pause")
    assert everything()
    hints = json.loads(server.get("/status")[1])["hints"]
    assert any(
        hint["title"] == "Retention is paused" and "jumped forward by 3.0 days" in hint["text"] for hint in hints
    )
    server.logged("retention is paused: nothing is forgotten")
    for offset in ("+4d", "+0d"):
        server.drain()
        clock.jump(offset)
        server.start()
        eventually(paused, "a restart ends the pause")
        assert everything()
    told = histospec("forget", "--older-than", "1d", "--data-dir", server.data_dir).end()
    assert told == (0, "0 prompts forgotten; a paused retention continues\n")
    eventually(lambda: not paused(), "retention does not go on")
    assert everything()
    server.drain()
