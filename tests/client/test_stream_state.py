"""The messages of a stream, checked against a model of the server under random operations, without a network.

The model holds sessions exactly as the comments of the protocol say, forgets some, sometimes loses the stream, and
refuses every message that a real server would refuse. It tells its limits before the first message, or never. In every
case it must end with the worker's tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.client import Draft
from histospec.client.config import Breaker, Limits, configure
from histospec.client.core.core import Core
from histospec.client.core.message_limits import MessageLimits, ServerLimits
from histospec.client.core.recovery import CircuitBreaker
from histospec.client.core.shard import Shard
from histospec.client.core.stream_state import StreamState
from histospec.v1 import draft_pb2 as pb

UNLIMITED = ServerLimits()


class ModelServer:
    """Sessions of one stream, and the responses of all streams."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.sessions: dict[int, list[int]] = {}
        self.committed: list[list[int]] = []
        self.sequence = 0
        self.steps = self.late = 0
        self.stepped: set[int] = set()  # sessions that had a step since they were opened

    def hear(self, request: pb.DraftRequest) -> pb.DraftResponse | None:
        self.sequence += 1
        assert request.sequence == self.sequence
        assert request.ByteSize() <= self.limits.message, "too long"
        assert max(len(request.opens), len(request.closes), len(request.step.sessions) // 8) <= self.limits.batch
        assert request.step.max_tokens <= self.limits.draft
        assert len(self.sessions) + len(request.opens) <= self.limits.sessions, "too many sessions"
        for o in request.opens:
            assert o.session not in self.sessions, "opened twice"
            assert o.prompt
            self.sessions[o.session] = np.frombuffer(o.generated, "<i4").tolist()
            self.stepped.discard(o.session)
        unknown, tokens = [], []
        if request.HasField("step"):
            self.late += request.step.late
            assert self.late <= self.steps, "more late than there were"
            self.steps += 1
            sessions = np.frombuffer(request.step.sessions, "<u8").tolist()
            lengths = np.frombuffer(request.step.lengths, "<i4")
            positions = np.frombuffer(request.step.positions, "<i4")
            new = np.split(np.frombuffer(request.step.tokens, "<i4"), np.cumsum(lengths))
            assert len(sessions) == len(lengths) == len(positions) == len(new) - 1
            assert not len(new.pop())
            if any((text >= MARK).any() for text in new):
                self.check_report(request.step, sessions, new)
            for s, position, text in zip(sessions, positions, new, strict=True):
                if s not in self.sessions:
                    unknown.append(s)
                else:
                    assert position == len(self.sessions[s]), "a gap or an overlap"
                    self.sessions[s] += text.tolist()
                    self.stepped.add(s)
                tokens.append(len(self.sessions.get(s, [])))
        for c in request.closes:
            held = self.sessions.pop(c.session, None)
            if c.commit and (held is None or len(held) != c.generated):
                unknown.append(c.session)
            elif c.commit and held is not None:
                self.committed.append(held)
        if not (request.HasField("step") or any(c.commit for c in request.closes) or unknown):
            return None
        return pb.DraftResponse(
            sequence=request.sequence,
            lengths=np.ones(len(tokens), "<i4").tobytes(),
            tokens=np.array(tokens, "<i4").tobytes(),
            probs=np.ones(len(tokens), "<f4").tobytes(),
            unknown=np.array(unknown, "<u8").tobytes(),
        )

    def check_report(self, step: pb.Step, sessions: list[int], new: list[Any]) -> None:
        """Each worker's step is reported once, with its tokens. Of a draft from another stream nothing is verified."""
        report = [np.frombuffer(a, "<i4") for a in (step.verified, step.model_drafted, step.model_accepted)]
        for s, text, *said in zip(sessions, new, *report, strict=True):
            if s not in self.sessions:
                continue
            steps = int((text >= MARK).sum())
            verified, drafted, accepted = said
            assert (drafted, accepted) == (len(text) + steps, len(text) - steps)
            assert verified == steps or (verified == steps - 1 and s not in self.stepped)


MARK = 1000
"""Added to the first token of each step of a worker that reports."""


def marked(new: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """The tokens of a worker that reports, and what it says: it verified one token of the server's, and its own."""
    some = [[text[0] + MARK, *text[1:]] if text else [] for text in new]
    return some, {
        "verified": [int(bool(text)) for text in new],
        "model_drafted": [len(text) + 1 if text else 0 for text in new],
        "model_accepted": [max(0, len(text) - 1) for text in new],
    }


class World:
    """A core, the model server behind a delayed wire, and the expected state."""

    def __init__(self, message_bytes: int, limits: ServerLimits = UNLIMITED, reports: bool = False) -> None:
        self.limits = limits
        self.reports = reports
        self.now = 0.0
        config = configure("h:1", "run", limits=Limits(message_bytes=message_bytes))
        self.core = Core(config, lambda: None, lambda: self.now)
        self.shard = self.core.shards[0]
        self.server = ModelServer(limits)
        self.truth: dict[int, list[int]] = {}
        self.closed: list[list[int]] = []
        self.answers: list[pb.DraftResponse] = []
        self.stream: StreamState | None = None

    def exchange(self, write: bool = True, answers: int = 1000) -> None:
        """Delivers the messages, or leaves them in the outbox, and delivers this many answers."""
        if self.shard.stream is not self.stream:  # sessions end with their stream
            self.stream, self.answers = self.shard.stream, []
            committed, self.server = self.server.committed, ModelServer(self.limits)
            self.server.committed = committed
            if self.stream is not None:
                self.core.connected(self.shard, self.stream, self.limits)
        if self.stream is None:
            return
        while write and self.stream.outbox:
            answer = self.server.hear(self.stream.outbox.popleft())
            if answer is not None:
                self.answers.append(answer)
        for _ in range(min(answers, len(self.answers))):
            self.core.reply(self.shard, self.stream, self.answers.pop(0))

    def step(self, sessions: list[int], new: list[list[int]], write: bool = True, answers: int = 1000) -> list[Draft]:
        new, report = marked(new) if self.reports else (new, {})
        for s, text in zip(sessions, new, strict=True):
            self.truth[s] += text
        pending = self.core.send(sessions, new, **report)
        self.exchange(write, answers)
        self.core.end_wait(pending)
        return pending.drafts()


@contextlib.contextmanager
def away(shard: Shard) -> Iterator[None]:
    """The shard's breaker is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard.breaker, "allows", lambda now: False)
        yield


TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=3)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(0, 255), TOKENS, st.booleans(), st.integers(0, 2)),
        st.tuples(st.just("close"), st.integers(0, 255), st.booleans()),
        st.tuples(st.just("forget"), st.integers(0, 255)),
        st.tuples(st.just("lose")),
        st.tuples(st.just("silent"), st.integers(0, 255), TOKENS),
        st.tuples(st.just("flush")),
        st.tuples(st.just("rehearse"), st.booleans(), st.integers(0, 2)),
    ),
    min_size=8,
    max_size=40,
)


LIMITS = st.sampled_from(
    [
        UNLIMITED,
        ServerLimits(batch=1),
        ServerLimits(batch=3, message=300, draft=2),
        ServerLimits(message=250),
        ServerLimits(sessions=2),
        ServerLimits(batch=2, message=250, sessions=4),
        ServerLimits(sessions=40),
    ]
)


@settings(max_examples=400)
@given(OPERATIONS, st.sampled_from([1, 40, 4 << 20]), LIMITS, st.booleans())
def test_server_holds_what_the_worker_generated(
    operations: list[tuple[Any, ...]], message_bytes: int, limits: ServerLimits, reports: bool
) -> None:
    world = World(message_bytes, limits, reports)

    def chosen(bits: int) -> list[int]:
        return [s for s in world.truth if bits >> s % 8 & 1]

    for name, *arguments in [("open", 4), *operations]:
        world.now += 10  # past every cool-down
        if name == "open":
            world.truth |= {s: [] for s in world.core.open([[1]] * arguments[0])}
        elif name == "step":
            sessions = chosen(arguments[0])
            world.step(sessions, [arguments[1]] * len(sessions), *arguments[2:])
        elif name == "silent":  # the breaker is open: the core may not send
            sessions = chosen(arguments[0])
            with away(world.shard):
                world.step(sessions, [arguments[1]] * len(sessions))
        elif name == "close":
            sessions = chosen(arguments[0])
            world.core.finish(sessions, commit=arguments[1])
            texts = [world.truth.pop(s) for s in sessions]
            world.closed += [text for text in texts if arguments[1] and text]
        elif name == "forget":
            for s in chosen(arguments[0]):
                world.server.sessions.pop(s, None)
        elif name == "lose" and world.shard.stream is not None:
            world.core.end(world.shard, world.shard.stream, grpc.StatusCode.UNAVAILABLE, "")
            world.exchange()
        elif name == "rehearse":
            world.core.rehearse()
            world.exchange(*arguments)
        elif name == "flush":
            world.core.flush()
            world.exchange()
    # The client finds unknown sessions and opens them again; each small message carries one waiting response.
    for _ in range(8 + 2 * len(world.closed)):
        world.now += 10
        sessions = list(world.truth)
        drafts = world.step(sessions, [[]] * len(sessions))
        world.core.flush()
        world.exchange()
    held = world.server.sessions
    assert set(held) <= set(world.truth)  # nothing is left behind
    assert {s: world.truth[s] for s in held} == held
    stream = world.shard.stream
    running = MessageLimits.of(stream.own_limits, stream.server_limits).running if stream else len(world.truth)
    assert len(held) == len(world.truth) or len(held) >= running > 0
    assert [d.tokens.tolist() for d in drafts] == [[len(world.truth[s])] if s in held else [] for s in sessions]
    lost = world.core.stats().dropped_commits
    committed = list(world.server.committed)
    for text in world.closed:
        if text in committed:
            committed.remove(text)
        else:
            lost -= 1
    assert lost >= 0  # every response is stored, or counted as dropped
    stats = world.core.stats()
    assert (stats.refused, stats.pending_commits) == (0, 0)


def test_old_news_does_not_open_a_session_twice() -> None:
    """Two steps meet a server that forgot the session. The second's answer comes after the session was opened again."""
    world = World(4 << 20)
    world.shard.breaker = CircuitBreaker(Breaker(failures=100))
    (session,) = sessions = world.core.open([[1]])
    world.truth[session] = []
    world.step(sessions, [[1]])
    world.server.sessions.clear()
    world.step(sessions, [[2]], answers=0)
    world.step(sessions, [[3]], answers=1)
    world.step(sessions, [[4]], answers=1)
    world.step(sessions, [[5]])
    assert world.server.sessions == {session: [1, 2, 3, 4, 5]}
    assert world.core.stats().reopened == 1


def test_what_was_verified_is_reported_once() -> None:
    """Steps that are not sent are reported with the next one; a session that is opened anew begins with nothing."""
    world = World(4 << 20, reports=True)
    sent: list[pb.Step] = []
    hear = ModelServer.hear

    def heard(server: ModelServer, request: pb.DraftRequest) -> pb.DraftResponse | None:
        if request.HasField("step"):
            sent.append(request.step)
        return hear(server, request)

    def said() -> list[list[int]]:
        step = sent[-1]
        return [np.frombuffer(a, "<i4").tolist() for a in (step.verified, step.model_drafted, step.model_accepted)]

    sessions = world.core.open([[1], [2]])
    world.truth |= {s: [] for s in sessions}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelServer, "hear", heard)
        world.step(sessions, [[1], [1]])
        with away(world.shard):
            world.step(sessions, [[1, 2, 3], []])
            world.step(sessions[:1], [[1, 2]])
        world.now += 10
        world.step(sessions, [[1], [1]])
        assert said() == [[3, 1], [4 + 3 + 2, 2], [2 + 1 + 0, 0]]
        assert world.shard.stream is not None
        with away(world.shard):
            world.step(sessions, [[1, 2, 3], [1]])
        world.core.end(world.shard, world.shard.stream, grpc.StatusCode.UNAVAILABLE, "")
        world.exchange()
        world.now += 10
        world.step(sessions, [[1, 2], []])
        world.now += 10
        world.step(sessions, [[1, 2], []])
        world.exchange()
    assert world.server.sessions == world.truth
    reported = [
        [np.frombuffer(a, "<i4").tolist() for a in (s.verified, s.model_drafted, s.model_accepted)] for s in sent
    ]
    assert [[0, 0], [3, 0], [1, 0]] in reported[2:]  # of the step that opened them alone
    assert [[2, 0], [6, 0], [2, 0]] not in reported


def test_late_drafts_are_added_to_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. The drafts of a step arrive after its caller has stopped waiting: `collect` returned none, later they are there.
    2. They count as late all the same; those of more than the newest LATE_ANSWERS messages are dropped.
    """
    monkeypatch.setattr("histospec.client.core.stream_state.LATE_ANSWERS", 2)
    world = World(4 << 20)
    sessions = world.core.open([[1], [2]])
    world.truth |= {s: [] for s in sessions}
    pending = []
    for _ in range(3):
        pending.append(world.core.send(sessions, [[1], [1, 2]]))
        world.exchange(answers=0)
        world.core.end_wait(pending[-1])
        assert list(map(len, pending[-1].drafts())) == [0, 0]
        assert pending[-1].answered() == []
    assert world.core.stats().late == len(pending)
    world.exchange(write=False)
    dropped, *rest = pending
    assert dropped.answered() == []
    for number, step in enumerate(rest, start=2):
        assert sorted(step.answered()) == [0, 1]
        assert [draft.tokens.tolist() for draft in step.drafts()] == [[number], [2 * number]]
