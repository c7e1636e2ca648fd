"""Finished responses that wait for their shards: the share of each shard, and the log of dropped ones."""

import logging
from collections import Counter
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histospec.client import Limits, ShardStats, Stats
from histospec.client.config import Endpoint, configure
from histospec.client.core.commits import Commit, CommitQueue
from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.outage_log import PAUSE, Losses
from histospec.client.core.shard import Shard
from histospec.v1 import draft_pb2 as pb

LIMITS = Limits(commits=12, commit_bytes=600, message_bytes=100)
NAMES = ("a", "b", "c")


class World:
    """A core with shards that answer when the test says so, and the responses finished so far."""

    def __init__(self) -> None:
        self.core = Core(configure("discover://seed:1", "run", limits=LIMITS), lambda: None, lambda: self.now)
        self.finished = 0
        self.now = 0.0
        self.shards: dict[str, Shard] = {}  # also those that have left
        self.update(NAMES)

    def update(self, names: tuple[str, ...]) -> None:
        self.core.update([Endpoint(name, f"{name}:1") for name in names])
        self.shards |= {shard.name: shard for shard in self.core.shards}

    def finish(self, prompt: int, tokens: int, flush: bool) -> None:
        """Finishes a response. Checks that every shard that lost responses held more than its share."""
        (session,) = self.core.open([[prompt]])
        self.core.send([session], [[1] * tokens], max_tokens=0)
        before = self.core.stats().shards
        owner = self.core.shard_of(_i32([prompt]), "").name
        size = 4 * tokens + 4
        self.core.finish([session])
        self.finished += 1
        members = {shard.name for shard in self.core.shards}
        for name, after in self.core.stats().shards.items():
            held = before.get(name, ShardStats())
            if after.dropped == held.dropped or name not in members:
                continue
            commits = held.pending + (name == owner)
            taken = held.pending_bytes + size * (name == owner)
            assert commits > LIMITS.commits / len(members) or taken > LIMITS.commit_bytes / len(members), name
        if flush:
            self.core.flush()

    def answer(self, name: str, how: str) -> None:
        """Lets a shard answer all messages: stored, not stored now, or unknown session."""
        shard = self.shards[name]
        if (stream := shard.stream) is None:
            return
        self.core.connected(shard, stream, ServerLimits())
        for message in stream.outbox:
            stream.wrote(message.sequence)
        stream.outbox.clear()
        for sequence in list(stream.commits):
            numbers = [c.session.number for c in stream.commits.get(sequence, [])]
            answer = pb.DraftResponse(sequence=sequence)
            if how == "unknown":
                answer.unknown = np.array(numbers, "<u8").tobytes()
            if how == "later":
                answer.refusals.extend(pb.Refusal(session=number, reason="store", later=True) for number in numbers)
            self.core.reply(shard, stream, answer)

    def lose(self, name: str) -> None:
        shard = self.shards[name]
        if shard.stream is not None:
            self.core.end(shard, shard.stream, grpc.StatusCode.UNAVAILABLE, "")

    def check_books(self) -> None:
        stats = self.core.stats()
        sizes = {s.name: [c.bytes for c in waiting(s)] for s in self.shards.values()}
        held = {name: (len(some), sum(some)) for name, some in sizes.items() if some}
        assert {n: (s.pending, s.pending_bytes) for n, s in stats.shards.items() if s.pending} == held
        totals = Counter[str]()
        for shard in stats.shards.values():
            totals.update(pending=shard.pending, committed=shard.committed, dropped=shard.dropped)
        assert (stats.pending_commits, stats.commits, stats.dropped_commits) == (
            totals["pending"],
            totals["committed"],
            totals["dropped"],
        )
        assert totals.total() == self.finished
        assert stats.pending_commits <= LIMITS.commits
        assert sum(size for _, size in held.values()) <= LIMITS.commit_bytes


def waiting(shard: Shard) -> list[Commit]:
    sent = shard.stream.commits.values() if shard.stream else ()
    return [*shard.queue.waiting, *(commit for batch in sent for commit in batch)]


SHARD = st.sampled_from(NAMES)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("finish"), st.integers(0, 30), st.integers(1, 40), st.booleans()),
        st.tuples(st.just("finish"), st.integers(0, 30), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("answer"), SHARD, st.sampled_from(["stored", "stored", "later", "unknown"])),
        st.tuples(st.just("lose"), SHARD),
        st.tuples(st.just("update"), st.sampled_from([NAMES, NAMES[:2], NAMES[1:], NAMES[:1]])),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_a_shard_within_its_share_loses_nothing(operations: list[tuple[Any, ...]]) -> None:
    """Shards join, leave and fail: only a shard over its share loses responses, each counts once, and limits hold."""
    world = World()
    for name, *arguments in operations:
        world.now += 40  # past every pause
        getattr(world, name)(*arguments)
        world.check_books()


def test_a_healthy_shard_beside_a_dead_one_loses_nothing() -> None:
    """A dead shard may use the unused share of a healthy one, until that one needs it."""
    world = World()
    world.update(("a", "b"))
    owned = {name: [p for p in range(99) if world.core.shard_of(_i32([p]), "").name == name] for name in "ab"}
    for prompt in owned["a"][:12]:
        world.finish(prompt, 1, flush=True)
    assert world.core.stats().shards["a"] == ShardStats(pending=12, pending_bytes=96)  # no other responses
    for prompt in owned["b"][:6]:
        world.finish(prompt, 1, flush=True)
    stats = world.core.stats().shards
    assert (stats["a"].pending, stats["a"].dropped, stats["b"].pending, stats["b"].dropped) == (6, 6, 6, 0)
    world.answer("b", "stored")
    for prompt in owned["b"][6:12]:
        world.finish(prompt, 1, flush=True)
        world.answer("b", "stored")
    stats = world.core.stats().shards
    assert (stats["b"].committed, stats["b"].dropped, stats["a"].pending) == (12, 0, 6)


def test_what_is_on_its_way_counts_and_goes_last() -> None:
    """A shard over its share that never answers loses responses that were sent to it, too."""
    world = World()
    world.update(("a", "b"))
    owned = {name: [p for p in range(99) if world.core.shard_of(_i32([p]), "").name == name] for name in "ab"}
    for prompt in owned["a"][:9]:
        world.finish(prompt, 1, flush=True)
    (a, _) = world.core.shards
    assert a.stream is not None
    assert (len(a.queue.waiting), sum(len(batch) for batch in a.stream.commits.values())) == (0, 9)
    for prompt in owned["b"][:6]:
        world.finish(prompt, 1, flush=False)
    assert [(s.pending, s.dropped) for s in world.core.stats().shards.values() if s.pending] == [(6, 3), (6, 0)]
    world.answer("a", "stored")
    assert world.core.stats().shards["a"].committed == 6


def test_responses_that_a_leaving_shard_cannot_store_go_to_the_others() -> None:
    world = World()
    world.update(("a", "b"))
    mine = [p for p in range(99) if world.core.shard_of(_i32([p]), "").name == "a"][:3]
    for prompt in mine:
        world.finish(prompt, 1, flush=True)
    world.update(("b",))
    world.answer("a", "later")
    world.now += 40
    world.core.flush()
    world.answer("b", "stored")
    assert world.core.stats().shards["b"].committed == 3


def test_the_response_of_a_refused_session_is_counted_as_dropped() -> None:
    world = World()
    (session,) = world.core.open([[1]])
    pending = world.core.send([session], [[1, 2]])
    ((shard, _),) = pending.parts
    assert shard.stream is not None
    refusal = pb.Refusal(session=session, reason="too long")
    answer = pb.DraftResponse(sequence=1, lengths=_i32([0]), refusals=[refusal])
    world.core.reply(shard, shard.stream, answer)
    world.core.finish([session])
    stats = world.core.stats()
    assert (stats.dropped_commits, stats.pending_commits) == (1, 0)
    assert isinstance(stats, Stats)


def test_drops_are_said_once_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    losses = Losses(lambda: now[0])
    with caplog.at_level(logging.WARNING, "histospec.client"):
        for _ in range(1000):
            losses.note("a", 7, "too many wait")
        losses.note("b", 3, "too many wait")
        losses.report()
        now[0] += PAUSE
        losses.report()
        losses.report()
        losses.note("a", 7, "refused")
        losses.report(all_of_them=True)
    assert [record.getMessage() for record in caplog.records] == [
        "HistoSpec: a: lost a finished response of 7 tokens: too many wait",
        "HistoSpec: b: lost a finished response of 3 tokens: too many wait",
        "HistoSpec: a: lost 999 finished responses of 6993 tokens: too many wait",
        "HistoSpec: a: lost a finished response of 7 tokens: refused",
    ]


@pytest.mark.parametrize("flushes", [False, True])
def test_a_dead_shard_does_not_fill_the_log(caplog: pytest.LogCaptureFixture, flushes: bool) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, "histospec.client.core.outage_log"), caplog.at_level(logging.WARNING):
        for n in range(200):
            world.finish(n, 5, flush=flushes)
    lines = [r.getMessage() for r in caplog.records if ": lost " in r.getMessage()]
    assert world.core.stats().dropped_commits > 150
    assert len(lines) <= len(NAMES)
    assert all(line.split(": ")[1] in NAMES for line in lines)


def _i32(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_responses_that_wait_are_not_called_lost(caplog: pytest.LogCaptureFixture) -> None:
    queue = CommitQueue("a")
    for _ in range(2):  # one line for each outage
        queue.pause("store: the disk is full; the request is refused", 0.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "HistoSpec: a: responses wait for its store, and none is lost: store: the disk is full; the request is refused"
    )
