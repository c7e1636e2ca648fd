"""The engine's contract for its callers: keywords, numpy arrays, threads. Takes about 5 s."""

import pickle
import sys
import threading
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest

from histospec.native import Engine
from tests.native.conftest import BIG, PROMPT, RESPONSE, SESSION, i32, i64
from tests.support.waiting import Latch


def flat(parts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and offsets, as a step takes them."""
    return i32(*chain.from_iterable(parts)), i64(0, *accumulate(map(len, parts)))


def advance(engine: Engine, session: int, tokens: list[int], **options: Any) -> list[int]:
    """One step of one session; its draft."""
    draft: list[int] = engine.step(i64(session), np.array(tokens, np.int32), i64(0, len(tokens)), **options)[0].tolist()
    return draft


# --- Names, dtypes and shapes ---


def test_every_argument_goes_by_its_name() -> None:
    e = Engine(memory_bytes=1 << 28, history_epochs=4)
    mask = np.ones(len(RESPONSE), bool)
    e.ingest(
        namespace="run", prompt=PROMPT, responses=[RESPONSE], epoch=3, rewards=[1.0], problem="p", generated=[mask]
    )
    s = e.open(namespace="run", prompt=PROMPT, problem="p", generated=RESPONSE[:2])
    assert type(s) is int
    e.step(
        sessions=i64(s),
        new_tokens=i32(23),
        new_offsets=i64(0, 1),
        max_tokens=4,
        verify_cost=0.05,
        positions=i64(2),
    )
    assert e.lengths(sessions=i64(s)).tolist() == [3]
    assert e.generated(session=s).tolist() == RESPONSE[:3]
    e.close(session=s, commit=True, epoch=5)
    assert [epoch for _, epoch in e.history(namespace="run", prompt=PROMPT, problem="p")] == [3, 5]
    e.predict_length(namespace="run", prompt=PROMPT, generated=0, quantiles=[0.5], problem="p")
    assert e.drop_namespace(namespace="run") == 2


def test_a_step_gives_flat_arrays(engine: Engine) -> None:
    other = engine.open("run", [1])
    tokens, offsets, probs = engine.step(i64(other, SESSION), i32(), i64(0, 0, 0), 5, 0.01)
    assert [array.dtype.name for array in (tokens, offsets, probs)] == ["int32", "int64", "float32"]
    assert tokens.shape == probs.shape == (offsets[-1],)
    assert offsets.shape == (3,)
    assert offsets[0] == 0
    assert offsets[1] == 0, "a prompt of one token that occurs nowhere has no draft"
    assert tokens.tolist() == RESPONSE[3:8]
    assert ((probs > 0) & (probs < 1)).all()


def test_results_belong_to_the_caller(engine: Engine) -> None:
    first, _, _ = engine.step(i64(SESSION), i32(), i64(0, 0))
    history, generated = engine.history("run", PROMPT)[0][0], engine.generated(SESSION)
    expected = first.tolist()
    for array in (first, history, generated):
        array[:] = 999
    assert advance(engine, SESSION, []) == expected
    assert engine.history("run", PROMPT)[0][0].tolist() == RESPONSE
    del engine
    assert (first == 999).all()


def test_other_results_have_stated_types(engine: Engine) -> None:
    lengths = engine.lengths(i64(SESSION, 77))
    assert (lengths.dtype.name, lengths.tolist()) == ("int64", [3, -1])
    generated = engine.generated(SESSION)
    assert (generated.dtype.name, generated.tolist()) == ("int32", RESPONSE[:3])
    ((tokens, epoch),) = engine.history("run", PROMPT)
    assert (tokens.dtype.name, tokens.tolist(), epoch) == ("int32", RESPONSE, 2)
    quantiles, observations = engine.predict_length("run", PROMPT)
    assert (quantiles.dtype.name, quantiles.tolist(), observations) == ("float64", [10.0] * 4, 1)
    assert engine.history("absent", PROMPT) == []
    assert engine.drop_namespace("absent") == 0
    none, observations = engine.predict_length("absent", PROMPT)
    assert (none.shape, observations) == ((0,), 0)
    assert type(engine.memory_bytes()) is int
    engine.ingest("other", PROMPT, [RESPONSE])
    assert engine.shared_prompts(namespace="other", most=32) == (1, {"run": 1})


def test_counters_are_stats_as_columns(engine: Engine) -> None:
    advance(engine, SESSION, [])
    for number in range(3):
        engine.ingest(f"other {number}", PROMPT, [RESPONSE], epoch=number)
    namespaces, columns, values, dropped = engine.counters()
    assert (values.dtype.name, values.shape) == ("int64", (len(namespaces), len(columns)))
    assert (dropped.dtype.name, dropped.tolist()) == ("int64", [0] * len(columns))
    rows = {name: dict(zip(columns, row.tolist(), strict=True)) for name, row in zip(namespaces, values, strict=True)}
    expected = {}
    for name, stats in engine.stats()["namespaces"].items():
        kinds = {**stats["sources"], **stats["ages"]}
        flat_ones = {f"{kind}.{key}": value for kind, counted in kinds.items() for key, value in counted.items()}
        whole = {key: value for key, value in stats.items() if key not in ("sources", "ages")}
        expected[name] = {**whole, **flat_ones}
    assert rows == expected
    assert rows["run"]["drafts_hit"] == 2


def test_what_dropped_namespaces_counted_stays_in_one_row(engine: Engine) -> None:
    def counted() -> dict[str, int]:
        _, columns, values, dropped = engine.counters()
        sums = dict(zip(columns, (values.sum(axis=0) + dropped).tolist(), strict=True))
        held = ("problems", "sessions", "history_responses", "history_tokens", "bytes", "newest_epoch")
        return {name: value for name, value in sums.items() if name not in held}

    draft = advance(engine, SESSION, [])
    advance(engine, SESSION, [*draft[:2], 999])
    before = counted()
    assert before["accepted_tokens"] == before["history.accepted_tokens"] == 2
    engine.drop_namespace("run")
    assert (engine.counters()[0], counted()) == (["run"], before)  # its session goes on
    engine.close(SESSION, commit=False)
    engine.drop_namespace("run")
    assert (engine.counters()[0], counted()) == ([], before)
    engine.open("run", PROMPT)
    assert counted() == before | {"lookups_miss": before["lookups_miss"] + 1}


def test_a_rewound_namespace_keeps_what_was_learned_and_counted(engine: Engine) -> None:
    draft = advance(engine, SESSION, [])
    advance(engine, SESSION, [*draft[:2], 999])
    engine.close(SESSION, commit=True)
    engine.wait_until_built()
    learned, before = engine.estimator_state("run"), engine.stats()["namespaces"]["run"]
    assert learned
    assert engine.drop_namespace("run", keep_learned=True) == 2
    after = engine.stats()["namespaces"]["run"]
    assert engine.estimator_state("run") == learned
    assert after["problems"] == after["history_tokens"] == after["newest_epoch"] == 0
    held = ("problems", "history_responses", "history_tokens", "newest_epoch", "bytes")
    assert {k: v for k, v in after.items() if k not in held} == {
        k: v for k, v in before.items() if k not in (*held, "sessions")
    } | {"sessions": 0}
    assert engine.history("run", PROMPT) == []
    assert engine.drop_namespace("absent", keep_learned=True) == 0
    assert "absent" not in engine.stats()["namespaces"]
    engine.check_integrity()


def test_stats_count(engine: Engine) -> None:
    draft = advance(engine, SESSION, [])
    advance(engine, SESSION, [*draft[:2], 999])
    stats = engine.stats()
    assert set(stats) == {"namespaces", "sessions", "index_bytes"}
    assert stats["sessions"] == 1
    assert stats["index_bytes"] == engine.memory_bytes() > 0
    run = stats["namespaces"]["run"]
    assert run["accepted_tokens"] == 2
    assert run["generated_tokens"] == 6
    assert run["lookups_hit"] == 1
    assert run["lookups_miss"] == 0
    assert run["drafts_hit"] + run["drafts_empty"] == 3
    assert run["history_responses"] == 1
    assert run["history_tokens"] == len(RESPONSE)
    assert run["newest_epoch"] == 2


def test_tokens_without_a_draft_are_those_beyond_what_a_step_gives() -> None:
    engine = Engine(1 << 24)
    engine.ingest("run", PROMPT, [RESPONSE])
    session = engine.open("run", PROMPT)

    def undrafted() -> int:
        return engine.stats()["namespaces"]["run"]["undrafted_tokens"]

    advance(engine, session, RESPONSE[:1], max_tokens=0)
    assert undrafted() == 0, "the first token comes with the prompt"
    advance(engine, session, RESPONSE[1:4], max_tokens=0)
    assert undrafted() == 3, "no draft was asked for: a step each"
    draft = advance(engine, session, [])
    assert draft
    draft = advance(engine, session, [*draft[:2], RESPONSE[6]])
    assert undrafted() == 3, "a step gives what was accepted, and one token more"
    advance(engine, session, [*draft[:1], 997, 998, 999], max_tokens=0)
    assert undrafted() == 5, "that draft was late: two steps ran without it"
    advance(engine, session, [], verify_cost=1.0)
    advance(engine, session, [996])
    assert undrafted() == 5, "an empty draft is a step, too"


# --- What is accepted ---


@pytest.mark.parametrize(
    "as_tokens",
    [
        pytest.param(list, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(lambda v: [np.int64(t) for t in v], id="list of numpy integers"),
        pytest.param(lambda v: np.array(v, np.int32), id="int32"),
        pytest.param(lambda v: np.repeat(np.array(v, np.int32), 2)[::2], id="strided"),
        pytest.param(lambda v: np.array(v[::-1], np.int32)[::-1], id="reversed"),
        pytest.param(lambda v: np.array([v, v], np.int32).T.copy()[:, 1], id="column"),
        pytest.param(lambda v: pickle.loads(pickle.dumps(np.array(v, np.int32))), id="unpickled"),
        pytest.param(lambda v: np.frombuffer(np.array(v, np.int32).tobytes(), np.int32), id="read-only"),
    ],
)
def test_tokens_may_be(as_tokens: Callable[[list[int]], Any]) -> None:
    e = Engine(memory_bytes=1 << 28)
    e.ingest("run", as_tokens(PROMPT), [as_tokens(RESPONSE)])
    s = e.open("run", as_tokens(PROMPT), generated=as_tokens(RESPONSE[:3]))
    assert e.generated(s).tolist() == RESPONSE[:3]
    assert advance(e, s, [], max_tokens=4) == RESPONSE[3:7]
    assert e.history("run", as_tokens(PROMPT))[0][0].tolist() == RESPONSE


def test_arrays_of_a_step_need_not_be_contiguous(engine: Engine) -> None:
    twin = engine.open("run", PROMPT, generated=RESPONSE[:3])
    sessions, offsets = np.repeat(i64(SESSION, twin), 2)[::2], i64(4, 1, 0)[::-1]
    tokens, positions = np.array([RESPONSE[3:7]] * 2, np.int32).T.copy()[:, 0], np.repeat(i64(3, 3), 3)[::3]
    assert not any(a.flags.c_contiguous for a in (sessions, offsets, tokens, positions))
    engine.step(sessions, tokens, offsets, positions=positions)
    assert engine.generated(SESSION).tolist() == RESPONSE[:4]
    assert engine.generated(twin).tolist() == [*RESPONSE[:3], *RESPONSE[4:7]]


def test_unpickled_arrays_make_a_step(engine: Engine) -> None:
    arrays = pickle.loads(pickle.dumps((i64(SESSION), i32(*RESPONSE[3:5]), i64(0, 2))))
    assert engine.step(*arrays)[0].tolist()[:2] == RESPONSE[5:7]


def test_the_whole_range_of_tokens_works() -> None:
    e = Engine(memory_bytes=1 << 28)
    e.ingest("run", [0, BIG], [[BIG, 0, BIG - 1, 1, 2]])
    s = e.open("run", [0, BIG])
    assert advance(e, s, [BIG, 0]) == [BIG - 1, 1, 2]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_what_was_not_generated_is_never_drafted(dtype: Any) -> None:
    e = Engine(memory_bytes=1 << 28)
    mask = np.repeat(np.array([1, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype), 2)[::2]
    e.ingest("run", PROMPT, [RESPONSE], generated=[mask])
    s = e.open("run", PROMPT)
    assert advance(e, s, RESPONSE[:2], verify_cost=0.01) == RESPONSE[2:4]
    assert advance(e, s, RESPONSE[2:6], verify_cost=0.01) == RESPONSE[6:]
    e.ingest("run", PROMPT, [RESPONSE], generated=[None])


def test_a_closed_session_is_unknown(engine: Engine) -> None:
    engine.close(SESSION)
    for call in (engine.close, engine.generated, lambda session: advance(engine, session, [])):
        with pytest.raises(KeyError, match="session 1 is not open"):
            call(SESSION)
    assert engine.open("run", PROMPT) != SESSION
    assert [t.tolist() for t, _ in engine.history("run", PROMPT)] == [RESPONSE, RESPONSE[:3]]


# --- Drafts ---


def test_limits_of_a_draft(engine: Engine) -> None:
    assert advance(engine, SESSION, []) == RESPONSE[3:]
    assert advance(engine, SESSION, [], max_tokens=2) == RESPONSE[3:5]
    before = engine.stats()["namespaces"]["run"]
    assert advance(engine, SESSION, [], max_tokens=0) == []
    assert engine.stats()["namespaces"]["run"] == before, "a step without a draft is not an empty draft"
    for cost in (1.0, 1e30, float("inf")):
        assert advance(engine, SESSION, [], verify_cost=cost) == []
    assert advance(engine, SESSION, [], verify_cost=0.0) == RESPONSE[3:]


def test_a_step_sent_again_changes_nothing(engine: Engine) -> None:
    arrays = i64(SESSION), i32(*RESPONSE[3:6]), i64(0, 3)
    first = engine.step(*arrays, positions=i64(3))
    before = engine.stats()["namespaces"]["run"]
    again = engine.step(*arrays, positions=i64(3))
    assert [a.tolist() for a in again] == [a.tolist() for a in first]
    assert engine.generated(SESSION).tolist() == RESPONSE[:6]
    after = engine.stats()["namespaces"]["run"]
    for counter in ("generated_tokens", "accepted_tokens"):
        assert after[counter] == before[counter]
    # Of a message with old and new tokens, the engine appends the new ones.
    engine.step(i64(SESSION), i32(*RESPONSE[4:8]), i64(0, 4), positions=i64(4))
    assert engine.generated(SESSION).tolist() == RESPONSE[:8]
    # Without positions, all are new.
    advance(engine, SESSION, RESPONSE[4:8])
    assert engine.generated(SESSION).tolist() == RESPONSE[:8] + RESPONSE[4:8]


def test_closing_without_commit_leaves_no_trace(engine: Engine) -> None:
    advance(engine, SESSION, [91, 92, 93, 94, 95])
    engine.close(SESSION, commit=False)
    s = engine.open("run", PROMPT)
    assert advance(engine, s, [91, 92, 93], verify_cost=0.01) == []
    assert [t.tolist() for t, _ in engine.history("run", PROMPT)] == [RESPONSE]


# --- Threads ---


def test_the_gil_is_free_during_a_long_ingest() -> None:
    e = Engine(memory_bytes=1 << 30)
    texts = np.random.default_rng(0).integers(0, 50_000, (200, 10_000), dtype=np.int32)
    started, counted, done = Latch(), Latch(), Latch()

    def ingest() -> None:
        started.set()
        for _ in range(20):  # once is enough, unless the machine is too busy to run the other threads
            e.ingest("run", PROMPT, [*texts])
            if counted.is_set():
                break
        done.set()

    # A waiting thread asks for the GIL after the switch interval. With a long interval no thread gives it up, in a call
    # or between two: the other thread runs only if a call lets the GIL go.
    turns, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=ingest)
        thread.start()
        started.wait()
        while not done.is_set() and turns < 100:
            turns += 1
            counted.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert turns > 0


@pytest.mark.parametrize("groups", [1, 7])
def test_what_comes_from_history_is_counted_by_its_age(groups: int) -> None:
    """
    1. Seven epochs of a problem, each with a text of its own, in as many segments as they came in or fewer.
    2. A session that repeats the text of one of them: its tokens are counted under the age of that epoch.
    """
    e = Engine(history_epochs=8)
    texts = [list(range(100 * epoch, 100 * epoch + 60)) for epoch in range(1, 8)]
    for epoch, text in enumerate(texts):
        e.ingest("run", i32(1, 2), [i32(*text)] * (7 // groups), epoch=epoch)
    for epoch, text in enumerate(texts):
        before = e.stats()["namespaces"]["run"]["ages"]
        session = e.open("run", i32(1, 2))
        for at in range(0, 60, 4):
            e.step(i64(session), i32(*text[at : at + 4]), i64(0, 4), max_tokens=4)
        e.close(session)
        after = e.stats()["namespaces"]["run"]["ages"]
        grown = {age for age in after if after[age]["accepted_tokens"] > before[age]["accepted_tokens"]}
        assert grown == {"0123"[6 - epoch] if epoch > 2 else "4+"}
    assert e.stats()["namespaces"]["run"]["bytes"] > 0
