"""The log lines about shards: one answers, does not answer, drafts again. The test controls the clock."""

import logging
import subprocess
import sys
from typing import Any

import grpc
import numpy as np
import pytest

from histospec.client import DraftClient
from histospec.client.config import Breaker, Endpoint, configure
from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.outage_log import PAUSE, Outage
from histospec.client.core.shard import Shard
from histospec.v1 import draft_pb2 as pb
from tests.support.servers import Server

REFUSED = "HistoSpec: no drafts from h:1 (UNAVAILABLE: refused), going on WITHOUT drafts"
CONNECTED = "HistoSpec: connected to h:1, namespace run"


class Worker:
    """One stepping session, and shards that answer as the test says. `said` is the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture, endpoint: str = "h:1", **config: Any) -> None:
        caplog.set_level(logging.INFO, "histospec")
        self._records = caplog.records
        self.core = Core(configure(endpoint, "run", **config), lambda: None, lambda: self.now)
        self.session = self.core.open([[1, 2]])
        self.now = 1000.0

    @property
    def said(self) -> list[str]:
        lines = [record.getMessage() for record in self._records]
        self._records.clear()
        return lines

    @property
    def shard(self) -> Shard:
        return self.core.shards[0]

    def step(self, max_tokens: int = 16) -> None:
        """A step without waiting for its drafts."""
        self.core.abandon(self.core.send(self.session, [[3]], max_tokens))

    def fail(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, details: str = "refused") -> None:
        """A step and the end of its stream; with an open breaker, the step alone."""
        self.step()
        if self.shard.stream is not None:
            self.core.end(self.shard, self.shard.stream, code, details)

    def answer(self) -> None:
        """Lets time pass until the shard is connected, and lets it answer the next step."""
        while self.shard.stream is None:
            self.now += 1
            self.step()
        if not self.shard.stream.connected:
            self.core.connected(self.shard, self.shard.stream, ServerLimits())
        pending = self.core.send(self.session, [[3]])
        sequence = self.shard.stream.queued
        empty = pb.DraftResponse(sequence=sequence, lengths=np.zeros(1, "<i4").tobytes())
        self.core.reply(self.shard, self.shard.stream, empty)
        assert pending.done
        self.core.end_wait(pending)


def test_an_outage_is_said_at_once_each_minute_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    worker.fail()
    assert worker.said == [REFUSED]
    start = worker.now
    for _ in range(40):  # tries fail, other steps are not even sent
        worker.fail()
        worker.now += 1
    assert worker.said == []
    worker.now = start + PAUSE
    worker.fail()
    worker.fail()
    assert worker.said == [REFUSED]
    worker.now = start + 2.5 * PAUSE
    worker.fail()
    assert worker.said == [REFUSED]
    worker.answer()
    assert worker.said == [f"HistoSpec: drafting again after {worker.now - start:.0f} s, from h:1"]
    worker.answer()
    assert worker.said == []


def test_the_minute_is_told_by_steps_that_are_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog, breaker=Breaker(failures=1, cooldown=10 * PAUSE, cooldown_max=10 * PAUSE))
    worker.fail()
    assert worker.said == [REFUSED]
    worker.now += PAUSE
    worker.step()
    assert worker.shard.stream is None
    assert worker.said == [REFUSED]


def test_a_shard_that_answers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    worker.answer()
    assert worker.said == [CONNECTED]
    worker.answer()
    assert worker.said == []


def test_what_the_adapter_says_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    worker.core.answered(worker.shard)
    worker.answer()
    assert worker.said == []


def test_an_outage_that_the_start_found_is_not_said_again_by_the_first_stream(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    worker.core.unreachable(worker.shard, grpc.StatusCode.UNAVAILABLE, "refused")
    assert worker.said == [REFUSED]
    worker.now += 9
    worker.fail()
    assert worker.said == []
    worker.answer()
    (again,) = worker.said
    assert again.startswith("HistoSpec: drafting again after ")


def test_a_shard_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    worker.answer()
    for _ in range(50):
        worker.fail()
        worker.answer()
    minutes = (worker.now - 1000) / PAUSE
    assert len(worker.said) <= 1 + 2 * (minutes + 1)


def test_an_outage_that_ends_before_its_reason_is_found_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    asked: list[Shard] = []
    worker.core.explain = asked.append
    worker.fail()
    assert asked == [worker.shard]
    worker.answer()
    worker.core.log_outage(worker.shard)
    assert worker.said == [CONNECTED]
    worker.fail()  # the next one does not have to wait for a minute
    assert asked == [worker.shard] * 2
    worker.core.log_outage(worker.shard, Outage("it rains", "take an umbrella"))
    assert worker.said == ["HistoSpec: it rains, going on WITHOUT drafts; take an umbrella"]


def test_nothing_is_said_of_a_client_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    worker.step()
    stream = worker.shard.stream
    assert stream is not None
    worker.core.stop()
    worker.core.end(worker.shard, stream, grpc.StatusCode.CANCELLED, "")
    worker.core.unreachable(worker.shard, grpc.StatusCode.UNAVAILABLE, "gone")
    assert worker.said == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("UNAUTHENTICATED", "a at h:1 does not let this client in (why), going on WITHOUT drafts; is HISTOSPEC_TOKEN"),
        ("PERMISSION_DENIED", "a at h:1 does not let this client in (why), going on WITHOUT drafts; are HISTOSPEC_TOK"),
        ("UNIMPLEMENTED", "a at h:1 is not a HistoSpec server (why), going on WITHOUT drafts; is HISTOSPEC_ENDPOINT"),
        ("DATA_LOSS", "no drafts from a at h:1 (DATA_LOSS: why), going on WITHOUT drafts"),
    ],
)
def test_the_reason_is_named(caplog: pytest.LogCaptureFixture, code: str, line: str) -> None:
    worker = Worker(caplog, "a=h:1")
    worker.fail(grpc.StatusCode[code], "why")
    assert worker.said[0].startswith(f"HistoSpec: {line}")


def test_a_shard_that_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog)
    for _ in range(2):
        pending = worker.core.send(worker.session, [[3]])
        worker.now += 2.5
        worker.core.end_wait(pending)
    (line,) = worker.said
    assert "h:1 (DEADLINE_EXCEEDED: no answer for 2 s, reconnecting), going on WITHOUT drafts" in line


def test_a_limit_is_no_outage_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A shard that drafts fewer tokens than requested, which Topology or a refusal tells."""
    worker = Worker(caplog)
    worker.step(100)
    stream = worker.shard.stream
    assert stream is not None
    worker.core.connected(worker.shard, stream, ServerLimits(draft=64))
    for asked in (64, 100, 100, 200):
        worker.step(asked)
    cut = "HistoSpec: h:1 drafts at most 64 tokens (--max-draft-tokens), and 100 are asked for; drafts are cut"
    assert worker.said == [cut]
    worker.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "opens: 9 are more than the limit of 5")
    assert worker.said == [
        "HistoSpec: h:1 accepts less than the client sent, RESOURCE_EXHAUSTED: opens: 9 are more than the limit of 5"
    ]


def test_each_shard_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog, "a=h:1,b=h:2")
    worker.session = worker.core.open([[n] for n in range(20)])
    pending = worker.core.send(worker.session, [[1]] * 20)
    assert len(pending.parts) == 2
    for shard in worker.core.shards:
        assert shard.stream is not None
        worker.core.end(shard, shard.stream, grpc.StatusCode.UNAVAILABLE, "gone")
    assert [line.split("(")[0] for line in worker.said] == [
        f"HistoSpec: no drafts from {x} " for x in ("a at h:1", "b at h:2")
    ]


def test_shards_that_are_found_at_last(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(caplog, "discover://seed:1")
    for _ in range(30):
        worker.core.looked()
        worker.step()
        worker.now += 1
    line = (
        "HistoSpec: no drafts from discover://seed:1 (UNAVAILABLE: no shard was found there), going on WITHOUT drafts"
    )
    assert worker.said == [line]
    worker.core.update([Endpoint("a", "a:1"), Endpoint("b", "b:1")])
    assert worker.said == ["HistoSpec: shards: a at a:1, b at b:1"]
    worker.core.looked()
    worker.core.update([Endpoint("a", "a:1")])  # b leaves; the session's problem is a's
    worker.said  # noqa: B018 - which shards there are now
    worker.answer()
    assert worker.said == [f"HistoSpec: drafting again after {worker.now - 1000:.0f} s, from a at a:1"]


def test_a_shard_that_is_found_but_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """This differs from finding no shard, and is logged at once."""
    worker = Worker(caplog, "discover://seed:1")
    worker.core.looked()
    worker.core.update([Endpoint("a", "a:1")])
    assert len(worker.said) == 2
    worker.fail()
    assert worker.said == ["HistoSpec: no drafts from a at a:1 (UNAVAILABLE: refused), going on WITHOUT drafts"]


# ---- a client that never gets a draft -------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "histospec.client" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_steps_that_are_all_late_are_named_once_and_at_the_end(
    shared_server: Server, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    """The breaker opens after the third; a script may end before that."""
    with DraftClient(shared_server.endpoint, "late", deadline=1e-9, breaker=Breaker(failures=3)) as client:
        sessions = client.open([[1]])
        for _ in range(steps):
            assert [len(draft) for draft in client.step(sessions, [[2]])] == [0]
        number = "1 step" if steps == 1 else f"{steps} steps"
        assert len(said(caplog)) == (steps > 2)
    *_, last = said(caplog)
    assert last.startswith(
        f"HistoSpec: {shared_server.endpoint} answered none of {number} within 1e-09 s, so there were NO drafts"
    )
    assert len(said(caplog)) == 1 + (steps > 2)


def test_a_client_that_got_an_answer_or_asked_for_none_says_nothing(
    shared_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with DraftClient(shared_server.endpoint, "late", deadline=60) as client:
        client.step(client.open([[1]]), [[2]])
    with DraftClient(shared_server.endpoint, "late", deadline=1e-9) as client:
        client.step(client.open([[1]]), [[2]], max_tokens=0)
    with DraftClient("127.0.0.1:9", "late"):
        pass
    assert said(caplog) == []


def test_a_short_script_without_a_server_says_so() -> None:
    """It ends before the reason is found out. Its only step is enough, with and without shutdown."""
    for end in ("client.shutdown()", ""):
        script = (
            "from histospec.client import DraftClient\nclient = DraftClient('127.0.0.1:9', 'run', deadline=10)\n"
            f"print(client.step(client.open([[1]]), [[2]]))\n{end}"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0
        (line,) = done.stderr.splitlines()
        assert line.startswith("HistoSpec: no ")
        assert "127.0.0.1:9" in line
        assert "going on WITHOUT drafts" in line
