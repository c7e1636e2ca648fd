"""The core while shards join and leave: every session and every finished response always has an owner."""

import numpy as np
import pytest

from histospec.client import Limits
from histospec.client.config import Endpoint, configure
from histospec.client.core.core import Core
from histospec.client.core.message_limits import ServerLimits
from histospec.client.core.shard import Shard
from histospec.protocol.placement import place, problem_digest
from histospec.v1 import draft_pb2 as pb

PROMPTS = [[7, p] for p in range(40)]


def endpoints(*names: str) -> list[Endpoint]:
    return [Endpoint(name, f"{name}:1") for name in names]


def owner(prompt: list[int], names: tuple[str, ...]) -> str:
    return names[place(problem_digest("run", np.array(prompt, "<i4").tobytes()), names)]


@pytest.fixture
def now() -> list[float]:
    """The time, which a test may change."""
    return [0.0]


@pytest.fixture
def core(now: list[float]) -> Core:
    return Core(configure("discover://seed:1", "run", limits=Limits(commits=1000)), lambda: None, lambda: now[0])


def sent(shard: Shard) -> list[pb.DraftRequest]:
    """Returns the messages to the shard, and removes them from the wire."""
    if shard.stream is None:
        return []
    messages = list(shard.stream.outbox)
    shard.stream.outbox.clear()
    return messages


def acknowledge(core: Core, shard: Shard, messages: list[pb.DraftRequest]) -> None:
    stream = shard.stream
    assert stream is not None
    core.connected(shard, stream, ServerLimits())
    for message in messages:
        stream.wrote(message.sequence)
        sessions = len(np.frombuffer(message.step.sessions, "<u8"))
        answer = pb.DraftResponse(sequence=message.sequence, lengths=np.zeros(sessions, "<i4").tobytes())
        core.reply(shard, stream, answer)


def committed(messages: list[pb.DraftRequest]) -> set[int]:
    return {close.session for message in messages for close in message.closes if close.commit}


def test_nothing_is_sent_and_nothing_lost_until_shards_are_found(core: Core, now: list[float]) -> None:
    assert not core.knows_shards()
    sessions = core.open(PROMPTS)
    pending = core.send(sessions, [[1]] * len(sessions))
    assert pending.done
    assert pending.touched == core.shards  # their streams look for shards
    core.end_wait(pending)
    assert [len(d) for d in pending.drafts()] == [0] * len(sessions)
    core.finish(sessions[:10])
    stats = core.stats()
    assert (stats.pending_commits, stats.skipped, stats.late) == (10, 1, 0)
    assert stats.breakers == {"discover://seed:1": "open"}
    assert core.flush() == core.shards
    assert not core.settled(core.shards)

    core.update(endpoints("a", "b"))
    core.looked()
    assert core.knows_shards()
    now[0] += 1000
    assert not core.knows_shards()
    assert set(core.stats().breakers) == {"a", "b"}
    core.flush()
    messages = {shard.name: sent(shard) for shard in core.shards}
    for number, prompt in zip(sessions, PROMPTS, strict=True):
        mine = messages[owner(prompt, ("a", "b"))]
        opened = {o.session: np.frombuffer(o.generated, "<i4").tolist() for m in mine for o in m.opens}
        assert opened[number] == [1]
        assert (number in committed(mine)) == (number in sessions[:10])


def test_only_sessions_whose_problem_moves_are_opened_anew(core: Core) -> None:
    core.update(endpoints("a", "b", "c"))
    sessions = core.open(PROMPTS)
    core.send(sessions, [[1]] * len(sessions))
    for shard in core.shards:
        acknowledge(core, shard, sent(shard))
    core.update(endpoints("a", "b", "c", "d"))
    core.send(sessions, [[2]] * len(sessions))
    core.flush()
    moved = {s for s, p in zip(sessions, PROMPTS, strict=True) if owner(p, ("a", "b", "c", "d")) == "d"}
    assert 0 < len(moved) < 20
    opened: dict[int, str] = {}
    closed: set[int] = set()
    for shard in core.shards:
        for message in sent(shard):
            opened |= {o.session: shard.name for o in message.opens}
            closed |= {c.session for c in message.closes if not c.commit}
    assert opened == dict.fromkeys(moved, "d")
    assert closed == moved  # at the shards that had them


def two_that_were_sent_everything(core: Core) -> list[Shard]:
    """Two shards to which every response was sent, without acknowledgements."""
    core.update(endpoints("a", "b"))
    sessions = core.open(PROMPTS)
    core.send(sessions, [[1]] * len(sessions))
    core.finish(sessions)
    core.flush()
    return core.shards


def test_a_shard_that_leaves_acknowledges_what_it_was_sent(core: Core) -> None:
    a, b = two_that_were_sent_everything(core)
    on_its_way = sent(a)
    assert committed(on_its_way)
    core.update(endpoints("b"))
    assert a.left
    assert not a.settled
    assert core.flush() == [a, b]  # both owe an acknowledgement
    acknowledge(core, a, on_its_way)
    acknowledge(core, b, sent(b))
    assert a.settled
    assert core.flush() == []
    assert (core.stats().commits, core.stats().pending_commits) == (len(PROMPTS), 0)


@pytest.mark.parametrize("end", ["stream breaks", "silence"])
def test_what_a_shard_that_left_never_acknowledged_goes_to_the_others(core: Core, now: list[float], end: str) -> None:
    import grpc

    a, b = two_that_were_sent_everything(core)
    lost = committed(sent(a))
    acknowledge(core, b, sent(b))
    core.update(endpoints("b"))
    if end == "silence":
        now[0] += 10
        core.flush()
    else:
        assert a.stream is not None
        core.end(a, a.stream, grpc.StatusCode.UNAVAILABLE, "gone")
        core.flush()
    messages = sent(b)
    assert committed(messages) == lost
    acknowledge(core, b, messages)
    assert (core.stats().commits, core.stats().pending_commits) == (len(PROMPTS), 0)


def test_a_shard_that_comes_back_elsewhere_keeps_its_problems(core: Core) -> None:
    core.update(endpoints("a", "b"))
    sessions = core.open(PROMPTS)
    core.send(sessions, [[1]] * len(sessions))
    before = {p: core.shard_of(np.array(p, "<i4").tobytes(), "") for p in map(tuple, PROMPTS)}
    core.update([Endpoint("a", "elsewhere:1"), Endpoint("b", "b:1")])
    assert before == {p: core.shard_of(np.array(p, "<i4").tobytes(), "") for p in map(tuple, PROMPTS)}
    a = core.shards[0]
    assert (a.endpoint.address, a.stream) == ("elsewhere:1", None)
    core.send(sessions, [[2]] * len(sessions))
    mine = {s for s, p in zip(sessions, PROMPTS, strict=True) if before[tuple(p)] is a}
    assert {o.session for message in sent(a) for o in message.opens} == mine


def test_a_member_that_owes_an_acknowledgement_does_not_leave(core: Core) -> None:
    core.update(endpoints("a", "b"))
    sessions = core.open(PROMPTS)
    core.send(sessions, [[1]] * len(sessions))
    core.finish(sessions)
    for _ in range(2):
        assert [shard.name for shard in core.flush()] == ["a", "b"]


def test_each_shard_gets_its_rows_of_a_step() -> None:
    """With as many tokens and reports as the caller gave; those of a refused session go to none, but are kept."""
    core = Core(configure("a:1,b:1,c:1", "run"), lambda: None)
    sessions = core.open([[i, 7] for i in range(40)])
    refused = sessions[5]
    core._open.by_number[refused].refused = True
    core._stats.refused = 1
    tokens = [[i] * (i % 4) for i in range(40)]
    told = list(range(40))
    pending = core.send(sessions, tokens, verified=told, model_drafted=told, model_accepted=[0] * 40)
    assert len(pending.parts) == 3
    found = []
    for shard, part in pending.parts:
        (message,) = shard.stream.outbox
        step, start = message.step, 0
        numbers = np.frombuffer(step.sessions, "<u8").tolist()
        counts = (step.lengths, step.verified, step.model_drafted)
        lengths, verified, drafted = (np.frombuffer(count, "<i4").tolist() for count in counts)
        for row, number, length, seen, made in zip(part.rows, numbers, lengths, verified, drafted, strict=True):
            assert number == sessions[row]
            assert step.tokens[4 * start : 4 * (start + length)] == np.array(tokens[row], "<i4").tobytes()
            assert (seen, made) == (0, row)  # the message opens its session, so no draft of it was verified
            start += length
            found.append(row)
    assert sorted(found) == [row for row in range(40) if row != 5]
    assert bytes(core._open.by_number[refused].generated) == np.array(tokens[5], "<i4").tobytes()


def test_the_callers_tokens_are_read_without_the_lock() -> None:
    """They may be objects of any class, whose code may call the client."""
    core = Core(configure("a:1,b:1", "run"), lambda: None)
    read = []

    class Text:
        def __len__(self) -> int:
            return 2

        def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
            read.append(core.stats())
            return np.array([5, 6])

    (session,) = core.open([[1]])
    core.send([session], [Text()])  # type: ignore[list-item]
    assert read
    assert core._open.by_number[session].length == 2


def test_an_error_names_the_callers_row_whatever_the_shard() -> None:
    core = Core(configure("a:1,b:1", "run"), lambda: None)
    sessions = core.open([[i] for i in range(8)])
    for row in range(8):
        wrong = [[1]] * row + [[-1]] + [[1]] * (7 - row)
        with pytest.raises(ValueError, match=rf"^new_tokens\[{row}\]: "):
            core.send(sessions, wrong)
    assert not any(session.length for session in core._open.by_number.values())
