"""The memory budget: who goes first, what stays, and that it is counted. Takes about 1 s."""

import numpy as np

from histospec.native import Engine

BUDGET = 4 << 20
SHORT = [1]  # of each group, the first response is what the index over all problems keeps
NOBODY = Engine().memory_bytes()


def text(seed: int, size: int = 20_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, size, dtype=np.int32)


def known(engine: Engine, problems: range) -> list[int]:
    return [p for p in problems if engine.history("run", [p])]


def counted(engine: Engine) -> tuple[int, int]:
    run = engine.stats()["namespaces"]["run"]
    return run["history_responses"], run["evicted_responses"]


def test_the_least_recently_used_problem_goes_first() -> None:
    engine = Engine(BUDGET)
    for p in range(60):
        engine.ingest("run", [p], [SHORT, text(p)])
        assert engine.memory_bytes() <= BUDGET
        held = known(engine, range(p + 1))
        assert held == [*range(p + 1 - len(held), p + 1)], "the newest are held, without gaps"
        assert counted(engine) == (2 * len(held), 2 * (p + 1 - len(held)))
        engine.check_integrity()
    assert 1 < len(held) < 60
    # A session makes its problem a recent one; reading history does not.
    engine.close(engine.open("run", [held[0]]), commit=False)
    engine.ingest("run", [99], [SHORT, text(99)])
    assert engine.history("run", [held[0]])
    assert not engine.history("run", [held[1]])


def test_a_problem_in_use_loses_its_oldest_responses_only() -> None:
    engine = Engine(BUDGET, history_epochs=1000)
    session = engine.open("run", [1], generated=[7, 8, 9])
    for epoch in range(60):
        # Large and small by turns: merged in part, so that the oldest segments may go alone.
        last = text(epoch, 60_000 if epoch % 2 == 0 else 20_000)
        engine.ingest("run", [1], [SHORT, last], epoch=epoch)
        assert engine.memory_bytes() <= BUDGET
        held, evicted = counted(engine)
        assert held + evicted == 2 * (epoch + 1)
        history = [e for _, e in engine.history("run", [1])]
        assert history == sorted([*range(evicted // 2, epoch + 1)] * 2)
    assert evicted > 0
    assert held > 0
    assert engine.generated(session).tolist() == [7, 8, 9]
    tokens, _, _ = engine.step(np.array([session]), last[:5], np.array([0, 5]), verify_cost=0.01)
    assert tokens.tolist() == last[5:21].tolist()
    engine.check_integrity()


def test_running_sessions_stay_beyond_the_budget() -> None:
    engine = Engine(1)
    engine.ingest("run", [1], [[1, 2, 3]])
    assert counted(engine) == (0, 1)
    sessions = [engine.open("run", [1], generated=[5, 6, 7, 8, 9]) for _ in range(3)]
    engine.step(np.array(sessions[:1]), np.array([5, 6], np.int32), np.array([0, 2]))
    assert engine.lengths(np.array(sessions)).tolist() == [7, 5, 5]
    tokens, _, _ = engine.step(np.array(sessions[:1]), np.array([], np.int32), np.array([0, 0]), verify_cost=0.01)
    assert tokens.tolist()[:3] == [7, 8, 9], "siblings are live text, not history"
    for session in sessions:
        engine.close(session)
    engine.wait_until_built()
    assert counted(engine) == (0, 4)
    engine.check_integrity()


def test_what_is_dropped_is_given_back() -> None:
    engine = Engine(1 << 28)
    for p in range(20):
        engine.ingest("run", [p], [text(p)])
    assert engine.memory_bytes() > 20 * 20_000 * 4, "less than the text alone cannot hold it"
    assert engine.memory_bytes() < NOBODY + 20 * 20_000 * 48, "of 6 or 12 bytes a token and about 10 a distinct one"
    assert engine.drop_namespace("run") == 20
    assert engine.memory_bytes() == NOBODY
    assert engine.stats() == {"namespaces": {}, "sessions": 0, "index_bytes": NOBODY}


def test_text_that_problems_share_is_within_the_budget() -> None:
    engine = Engine(BUDGET)
    for p in range(60):
        engine.ingest("run", [p], [text(p)])
        assert engine.memory_bytes() <= BUDGET
        assert counted(engine)[0] > 0, "some history is left"


def test_namespaces_without_anything_are_within_the_budget() -> None:
    engine = Engine(BUDGET)
    for n in range(60):
        engine.ingest(f"run-{n}", [1], [[1, 2, 3]])
        assert engine.memory_bytes() <= BUDGET
