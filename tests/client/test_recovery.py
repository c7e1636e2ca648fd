"""A shard after an outage: how the client reconnects and brings back sessions and responses. All time is simulated.

The worker steps with a pause after each step. The server takes time for every byte, one message after the other, so a
step waits for what was sent before it.
"""

import grpc
import numpy as np
import pytest

from histospec.client import Breaker, Draft, Limits
from histospec.client.config import configure
from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.recovery import LEAST, RATE, SendWindow
from histospec.client.core.stream_state import StreamState
from histospec.v1 import draft_pb2 as pb

MIB = 1 << 20
DEADLINE = 0.02
PAUSE = 0.015
CAREFUL = int(RATE * DEADLINE)
TEXT = [7] * 4000  # 16 KB, the text of every session


class Server:
    """A server: its state, and its answers with their times of arrival."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.messages: list[pb.DraftRequest] = []
        self.answers: list[tuple[float, pb.DraftResponse]] = []
        self.sessions: set[int] = set()
        self._busy = 0.0

    def hear(self, message: pb.DraftRequest, now: float) -> None:
        self.messages.append(message)
        self._busy = max(now, self._busy) + 0.0005 + message.ByteSize() / self.rate
        self.sessions |= {o.session for o in message.opens}
        stepped = np.frombuffer(message.step.sessions, "<u8").tolist()
        assert set(stepped) <= self.sessions
        self.sessions -= {c.session for c in message.closes}
        if stepped or any(c.commit for c in message.closes):
            answer = pb.DraftResponse(
                sequence=message.sequence,
                lengths=np.ones(len(stepped), "<i4").tobytes(),
                tokens=np.ones(len(stepped), "<i4").tobytes(),
                probs=np.ones(len(stepped), "<f4").tobytes(),
            )
            self.answers.append((self._busy + 0.01 * bool(message.closes), answer))  # the disk's time
            self.answers.sort(key=lambda timed: timed[0])


class World:
    """A worker, and a server that may be away."""

    def __init__(self, sessions: int, rate: float = 10 * MIB, limits: Limits | None = None) -> None:
        self.core = Core(configure("h:1", "run", limits=limits), lambda: None, lambda: self.now)
        self.shard = self.core.shards[0]
        self.rate = rate
        self.now = 0.0
        self.server: Server | None = Server(rate)
        self.tries: list[float] = []
        self.sessions = self.core.open([TEXT] * sessions)
        self._stream: StreamState | None = None

    def step(self, sessions: list[int] | None = None, max_tokens: int = 16) -> list[Draft]:
        """Makes one step of these sessions, or of all, and the pause of a forward pass."""
        chosen = self.sessions if sessions is None else sessions
        pending = self.core.send(chosen, [[1]] * len(chosen), max_tokens)
        self._carry()
        while not pending.done:
            arrival = self.server.answers[0][0] if self.server and self.server.answers else pending.deadline
            self.now = max(self.now, min(arrival, pending.deadline))
            if arrival >= pending.deadline:
                break
            self._deliver()
        self.core.end_wait(pending)
        self.now += PAUSE
        return pending.drafts()

    def kill(self) -> None:
        self.server = None
        self._end("Socket closed")

    def until_open(self) -> None:
        while self.shard.breaker.state != "open":
            self.step()

    def start(self) -> Server:
        self.server = Server(self.rate)
        return self.server

    def finish(self, responses: int) -> None:
        """Finishes responses that the server does not know."""
        self.core.finish(self.core.open([[1]] * responses, generated=[TEXT] * responses))

    def _end(self, details: str) -> None:
        assert self.shard.stream is not None
        self.core.end(self.shard, self.shard.stream, grpc.StatusCode.UNAVAILABLE, details)

    def _carry(self) -> None:
        """Makes one turn of the loop. A connection succeeds, or is refused, in the turn after its start."""
        stream = self.shard.stream
        if stream is not self._stream:
            self._stream = stream
            if stream is not None and self.shard.breaker.state != "closed":
                assert not stream.outbox
                self.tries.append(self.now)
                return
        if stream is None:
            return
        if self.server is None:
            self._end("connection refused")
            return
        if not stream.connected:
            self.core.connected(self.shard, stream, ServerLimits())
        while stream.outbox:
            message = stream.outbox.popleft()
            self.server.hear(message, self.now)
            stream.wrote(message.sequence)
        self._deliver()

    def _deliver(self) -> None:
        assert self.server is not None
        while self.server.answers and self.server.answers[0][0] <= self.now:
            _, answer = self.server.answers.pop(0)
            assert self.shard.stream is not None
            self.core.reply(self.shard, self.shard.stream, answer)


def opened(message: pb.DraftRequest) -> int:
    """Bytes of its opens."""
    return sum(o.ByteSize() for o in message.opens)


# ---- away ---------------------------------------------------------------------------------------------------------


def test_a_try_is_a_connection_and_holds_up_no_step() -> None:
    world = World(64)
    world.step()
    world.kill()
    world.until_open()
    late, tried = world.core.stats().late, len(world.tries)
    before = world.now
    for _ in range(1000):
        assert not any(len(draft) for draft in world.step())
    assert world.now - before == pytest.approx(1000 * PAUSE)  # the forward passes alone
    assert world.core.stats().late == late
    gaps = np.diff(world.tries[tried + 1 :])
    assert len(gaps) > 15
    assert max(gaps) <= Breaker().reconnect * (1 + Breaker().jitter) + 2 * PAUSE


def test_the_first_try_after_the_return_succeeds() -> None:
    world = World(64)
    world.step()
    world.kill()
    for _ in range(500):
        world.step()
    world.start()
    returned, tried, failed = world.now, len(world.tries), world.core.stats().failed
    while not any(len(draft) for draft in world.step()):
        assert world.now - returned < 1.0
    assert len(world.tries) - tried <= 1  # one attempt may have been running
    assert world.core.stats().failed == failed


def test_a_connection_that_nobody_answers_is_left_alone_until_it_ends() -> None:
    """A machine that drops packets, or a hanging server: the step does not wait, and there is no second attempt."""
    world = World(4)
    world.step()
    world.kill()
    world.until_open()
    while world.shard.stream is None:
        world.step()
    stream = world.shard.stream
    for _ in range(300):
        pending = world.core.send(world.sessions, [[1]] * 4)
        assert pending.done
        assert pending.touched == [world.shard]  # the loop is to turn
        world.core.end_wait(pending)
        world.now += PAUSE
    assert world.shard.stream is stream
    assert not stream.outbox
    assert not world.core.settled([world.shard])  # a flush waits for it


# ---- back ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [4 * MIB, 10 * MIB, 100 * MIB])
@pytest.mark.parametrize("backlog", [0, 10_000])
def test_all_sessions_draft_soon_and_none_waits_for_the_backlog(rate: float, backlog: int) -> None:
    """256 sessions of 16 KB, which the slowest of these servers reads in a second; 160 MB of responses.

    It is reading for half of the time at least, and the next try to connect was less than 0.65 s away.
    """
    world = World(256, rate)
    world.sessions = world.sessions[:1]
    world.step()
    world.sessions = list(range(1, 257))
    world.kill()
    for _ in range(300):
        world.step()
    world.finish(backlog)
    world.step()
    server = world.start()
    late, returned, first = world.core.stats().late, world.now, 0.0
    waiting = set(range(256))
    while waiting:
        drafts = world.step()
        waiting -= {row for row, draft in enumerate(drafts) if len(draft)}
        first = first or (world.now if len(waiting) < 256 else 0.0)
        assert world.now - returned < 1.0 + 2 * 256 * 18_000 / rate
    assert first - returned < 0.8
    assert world.core.stats().late - late <= 3
    returned = world.now
    steps = 0
    while world.core.stats().pending_commits and steps < 20_000:
        assert len(world.step()) == 256
        assert world.shard.breaker.state == "closed"
        steps += 1
    assert (world.core.stats().commits, world.core.stats().dropped_commits) == (backlog, 0)
    assert world.core.stats().late - late <= 3 + steps // 50
    assert world.now - returned <= backlog * 16_100 / (rate / 10)  # a tenth of what the server could take
    assert len({o.session for m in server.messages for o in m.opens}) == 256 + backlog


def test_sessions_return_a_slice_a_step_and_before_responses() -> None:
    world = World(64, rate=100 * MIB)
    world.step()
    world.kill()
    for _ in range(100):
        world.step()
    world.finish(500)
    world.step()
    server = world.start()
    drafting = 0
    while drafting < 64:
        now_drafting = sum(len(draft) > 0 for draft in world.step())
        assert now_drafting >= drafting  # those that are back draft while others return
        drafting = now_drafting
    slices = [m for m in server.messages if m.opens and not m.closes]
    assert CAREFUL / 2 < opened(slices[0]) < CAREFUL + 20_000
    assert len(slices) > 3
    assert all(not m.closes for m in server.messages[: server.messages.index(slices[-1])])


def test_sessions_that_end_before_they_draft_do_not_keep_the_others_out() -> None:
    """The first slices are opened and forgotten again, so no answer ever tells that the server has read them."""
    world = World(64)
    world.shard.opening.reset()
    for _ in range(5):
        world.step()
        assert world.shard.stream is not None
        gone = list(world.shard.stream.server_has)
        assert gone
        world.core.finish(gone, commit=False)
        world.sessions = [session for session in world.sessions if session not in gone]
    while not all(len(draft) for draft in world.step()):
        assert world.now < 5


def test_a_late_slice_is_followed_by_half_of_it() -> None:
    world = World(64, rate=1 * MIB)
    world.step([])
    world.shard.opening.reset()
    server = world.server
    assert server is not None
    while len([m for m in server.messages if m.opens]) < 2:
        world.step()
    assert world.core.stats().late > 0
    first, second = [opened(m) for m in server.messages if m.opens][:2]
    assert second < first / 2 + 20_000


def test_a_server_that_is_late_while_sessions_return_is_asked_again_soon() -> None:
    world = World(256, rate=0.5 * MIB)
    world.step()
    world.kill()
    for _ in range(500):
        world.step()
    world.start()
    while world.shard.breaker.state != "closed":
        world.step()
    world.until_open()
    opened_at = world.now
    while world.core.stats().breakers == {"h:1": "open"}:
        world.step()
    assert world.now - opened_at <= Breaker().reconnect * (1 + Breaker().jitter) + 2 * PAUSE + DEADLINE


# ---- responses ----------------------------------------------------------------------------------------------------


def test_a_response_that_finishes_goes_with_the_next_step_whatever_waits() -> None:
    """So a backlog does not grow, however slowly it is sent."""
    world = World(8, rate=100 * MIB)
    world.step()
    world.kill()
    world.until_open()
    world.finish(2000)
    world.step()
    world.start()
    while not all(len(draft) for draft in world.step()):
        pass
    world.shard.committing.size = LEAST
    for _ in range(100):
        before = world.core.stats().pending_commits
        world.finish(5)
        world.step()
        world.shard.committing.size = LEAST
        assert world.core.stats().pending_commits <= before + 5
    stats = world.core.stats()
    assert stats.pending_commits < 2000
    assert stats.dropped_commits == 0


def test_no_more_than_a_message_of_responses_is_unacknowledged() -> None:
    limits = Limits(message_bytes=100_000)
    world = World(2, rate=100 * MIB, limits=limits)
    world.step()
    world.finish(100)
    for _ in range(3):  # nothing is answered
        world.core.send(world.sessions, [[1]] * 2)
    stream = world.shard.stream
    assert stream is not None
    assert 100_000 <= stream.in_flight.unacknowledged < 100_000 + 20_000
    while world.core.stats().pending_commits:
        world.step()
    assert (stream.in_flight.unacknowledged, stream.in_flight.commits, stream.in_flight.opens) == (0, 0, 0)


# ---- well ---------------------------------------------------------------------------------------------------------


def test_a_server_that_is_well_is_told_everything_at_once() -> None:
    world = World(200, rate=1000 * MIB)
    assert all(len(draft) for draft in world.step())
    world.finish(200)
    world.step()
    server = world.server
    assert server is not None
    assert sum(len(m.closes) for m in server.messages) == 200


def test_what_is_announced_needs_no_room() -> None:
    """A batch that begins is told of before its first step, without waiting: all of it, even after an outage."""
    world = World(1)
    world.step()
    world.kill()
    world.until_open()
    server = world.start()
    while not all(len(draft) for draft in world.step()):
        pass
    batch = world.core.open([TEXT] * 100)
    world.step(batch, max_tokens=0)
    assert server.sessions >= set(batch)


def test_pace_returns_to_unbounded_once_nothing_waits() -> None:
    window = SendWindow(DEADLINE, soon=DEADLINE / 2, growth=0.5)
    unbounded = window.size
    window.late(0)
    assert window.size == unbounded  # with nothing ahead of it, the backlog is not the cause
    window.late(8 * MIB)
    assert window.size == CAREFUL
    for _ in range(20):
        window.late(window.size)
    assert window.size == LEAST
    window.answered(DEADLINE, LEAST, more=True)
    window.answered(0.001, LEAST // 8, more=True)
    assert window.size == LEAST  # not soon, and not with much ahead
    window.answered(0.001, LEAST // 2, more=True)
    assert window.size > LEAST
    for _ in range(200):
        window.answered(0.001, 0, more=False)
    assert window.size == unbounded
