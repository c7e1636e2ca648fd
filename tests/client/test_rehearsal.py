"""Shortly before a step is due, the client sends an empty one, and nothing but the time of the step depends on it."""

import logging
import os
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from histospec.client import DraftClient
from histospec.client.config import configure
from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.client.errors import ConfigurationError
from histospec.client.transport import rehearsal
from histospec.client.transport.rehearsal import LEAD, LONGEST_PAUSE, SHORTEST_PAUSE, Rehearsals
from histospec.v1 import draft_pb2 as pb
from tests.support.clients import texts
from tests.support.servers import Starter
from tests.support.waiting import Latch, eventually

PAUSE = 0.03
PATIENT = 5.0  # a deadline that a busy machine does not miss


class Worker:
    """Steps with a clock of its own, which stands still while the thread waits, so that the thread is never early."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rehearsed: list[float] = []  # how long before its step was due
        self.due = 0.0
        self.steps = 0
        self.wanted: Callable[[], bool] = bool
        self.began, self.go_on = Latch(), Latch()
        self.go_on.set()
        self.rehearsals = Rehearsals(self.rehearse, lambda: self.now)

    def rehearse(self, wanted: Callable[[], bool]) -> None:
        self.wanted = wanted
        self.rehearsed.append(self.due)
        self.began.set()
        self.go_on.wait()

    def step(self, pause: float) -> None:
        self.now += pause
        self.rehearsals.stepped()
        self.now += 0.002
        self.due = self.now + pause
        self.steps += 1
        self.rehearsals.answered()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.go_on.set()
    worker.rehearsals.end()


def test_the_next_step_of_a_steady_worker_is_rehearsed(worker: Worker) -> None:
    for n in range(4):
        worker.step(PAUSE)
        if n:  # the first answer has no pause before it
            eventually(lambda: len(worker.rehearsed) == worker.steps - 1)
    assert worker.rehearsals._due is not None
    assert worker.due - worker.rehearsals._due == pytest.approx(LEAD)


def test_a_steady_worker_need_not_wake_the_thread(worker: Worker) -> None:
    rings = 0

    class Bell(queue.SimpleQueue[None]):
        def put(self, *args: Any, **kwargs: Any) -> None:
            nonlocal rings
            rings += 1
            super().put(*args, **kwargs)

    worker.rehearsals._bell = Bell()
    for n in range(6):
        worker.step(PAUSE)
        if n:
            eventually(lambda: len(worker.rehearsed) == worker.steps - 1)
            eventually(lambda: worker.rehearsals._wakes > worker.due - LEAD)  # it has rehearsed, and sleeps
    assert rings == 0
    for _ in range(9):
        worker.step(LONGEST_PAUSE)
    eventually(lambda: worker.rehearsals._wakes == worker.rehearsals._due)  # it sleeps for a second
    for _ in range(9):
        worker.step(2 * SHORTEST_PAUSE)
    assert rings > 0
    eventually(lambda: worker.rehearsed[-1] == worker.due)


def test_a_step_that_begins_is_not_rehearsed(worker: Worker) -> None:
    """Neither one that comes before its rehearsal, nor one in the middle of it."""
    worker.step(LONGEST_PAUSE)
    worker.step(LONGEST_PAUSE)
    worker.rehearsals.stepped()  # long before it is due
    for _ in range(9):
        worker.step(PAUSE)
    worker.go_on.clear()
    worker.began.clear()
    worker.step(PAUSE)
    worker.began.wait()
    assert worker.wanted()
    worker.rehearsals.stepped()
    assert not worker.wanted()
    assert all(due == pytest.approx(worker.rehearsed[0], abs=1) for due in worker.rehearsed)


@pytest.mark.parametrize("pause", [0.0, SHORTEST_PAUSE / 2, 2 * LONGEST_PAUSE])
def test_steps_right_after_each_other_and_rare_ones_are_not_rehearsed(worker: Worker, pause: float) -> None:
    for _ in range(12):
        worker.step(pause)
    assert worker.rehearsals._due is None
    assert not worker.rehearsals._running  # no thread began


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def started(rehearse: Callable[[Callable[[], bool]], None]) -> Rehearsals:
    """Rehearsals whose thread has begun."""
    now = [0.0]
    rehearsals = Rehearsals(rehearse, lambda: now[0])
    for _ in range(3):
        now[0] += PAUSE
        rehearsals.stepped()
        rehearsals.answered()
    return rehearsals


def test_the_thread_ends() -> None:
    before = tasks()
    rehearsals = started(lambda wanted: None)
    rehearsals.end()
    rehearsals.end()
    eventually(lambda: not tasks() - before)


def test_a_mistake_ends_the_thread_and_not_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    def mistake(wanted: object) -> None:
        raise RuntimeError("a mistake")

    before = tasks()
    rehearsals = started(mistake)
    eventually(lambda: caplog.records and not tasks() - before)
    rehearsals.stepped()
    rehearsals.answered()
    rehearsals.end()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def one_shard() -> tuple[Core, Any]:
    """A core that has stepped once, and its connected stream."""
    core = Core(configure("h:1", "run"), lambda: None)
    sessions = core.open([[1]])
    core.send(sessions, [[2]])
    shard = core.shards[0]
    assert shard.stream is not None
    assert not core.rehearse()  # it is not connected
    core.connected(shard, shard.stream, ServerLimits())
    return core, shard.stream


def test_a_rehearsal_waits_for_nothing_and_nothing_for_it() -> None:
    core, stream = one_shard()
    shard = core.shards[0]
    assert not core.rehearse()  # the step is not written
    stream.outbox.clear()
    assert not core.rehearse()  # the step is not answered
    one = pb.DraftResponse(sequence=1, lengths=b"\0" * 4)
    core.reply(shard, stream, one)
    assert core.rehearse() == [shard]
    (message,) = stream.outbox
    assert message == pb.DraftRequest(sequence=2, step=pb.Step())
    assert not core.rehearse()  # one at a time
    assert core.rehearsing([shard])
    stats = core.stats()
    core.reply(shard, stream, pb.DraftResponse(sequence=message.sequence))
    assert not core.rehearsing([shard])
    assert core.stats() == stats
    core.rehearse()
    core.lose_streams()
    assert not core.rehearsing([shard])


def test_a_shard_that_is_late_or_closed_is_not_asked() -> None:
    core, stream = one_shard()
    stream.outbox.clear()
    core.reply(core.shards[0], stream, pb.DraftResponse(sequence=1, lengths=b"\0" * 4))
    for _ in range(core.config.breaker.failures):
        core.shards[0].breaker.failure(0.0, soon=True)
    assert core.shards[0].breaker.state != "closed"
    assert not core.rehearse()
    core, stream = one_shard()
    stream.outbox.clear()
    core.reply(core.shards[0], stream, pb.DraftResponse(sequence=1, lengths=b"\0" * 4))
    core.stop()
    assert not core.rehearse()


@pytest.mark.parametrize(("switch", "cpus", "on"), [("", 2, True), ("1", 2, True), ("0", 2, False), ("", 1, False)])
def test_it_can_be_switched_off_and_needs_two_cpus(
    switch: str, cpus: int, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_REHEARSE", switch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    core: Any = Core(configure("h:1", "run"), lambda: None)
    assert rehearsal.of(core, core, core).on is on


def test_a_switch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_REHEARSE", "yes")
    with pytest.raises(ConfigurationError, match=r"HISTOSPEC_REHEARSE: must be 0 or 1, is 'yes'"):
        configure("h:1", "run")


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_server_answers_rehearsals_and_counts_steps_alone(
    switch: str, start_server: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_REHEARSE", switch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    server = start_server()
    steps = 0
    with DraftClient(server.endpoint, "run", deadline=PATIENT) as client:
        (session,) = client.open([[1, 2, 3]])
        text: list[int] = []
        monkeypatch.setattr(rehearsal, "LEAD", 0.015)  # of pauses of 20 ms: also on a slow machine

        def step() -> int:
            nonlocal steps
            client.step([session], [[steps]])
            text.append(steps)
            steps += 1
            stream = client._core.shards[0].stream
            assert stream is not None
            return stream.queued

        if switch == "1":
            eventually(lambda: step() > steps + 3)  # it pauses between two steps
        else:
            for _ in range(12):
                step()
                Latch().wait(PAUSE)
        client.finish([session], commit=True)
        client.flush(PATIENT)  # `history` waits for a commit only as long as `shutdown` does
        assert texts(client.history([1, 2, 3])) == [text]
        assert client.stats().steps == steps
        metrics = server.metrics()
        assert metrics["histospec_draft_seconds_count"] == steps
        assert metrics['histospec_rpc_seconds_count{method="Draft"}'] == steps + 1  # and the commit
    (line,) = server.logged("draft stream ended")
    assert line["steps"] == steps
    assert (line["messages"] > steps + 2) is (switch == "1")
