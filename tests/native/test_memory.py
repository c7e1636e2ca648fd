"""The memory budget: the order of evictions, what stays, the counters, and the memory of the process. Takes about 15 s.

The memory of the process is measured in a new process, which runs this file as a program.
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from histospec.native import Engine

BUDGET = 4 << 20
SHORT = [1]  # first response of each group, which the namespace index keeps
WORDS = (np.random.default_rng(0).zipf(1.3, 1 << 16) * 7919 % 32_000).astype(np.int32)  # with the frequencies of words
EMPTY = Engine().memory_bytes()
FIVE_TIMES_TOO_MUCH = (17_600_000, 24 << 20)  # tokens of about 7 bytes, budget in bytes
SLACK = 4 << 20  # for the segment while it is built, and for the test's own data


def text(seed: int, size: int = 20_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, size, dtype=np.int32)


def known(engine: Engine, problems: range) -> list[int]:
    return [p for p in problems if engine.history("run", [p])]


def counted(engine: Engine) -> tuple[int, int]:
    run = engine.stats()["namespaces"]["run"]
    return run["history_responses"], run["evicted_by_memory"]


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
    # A session makes its problem the most recently used one; reading its history does not.
    engine.close(engine.open("run", [held[0]]), commit=False)
    engine.ingest("run", [99], [SHORT, text(99)])
    assert engine.history("run", [held[0]])
    assert not engine.history("run", [held[1]])


def test_a_problem_in_use_loses_its_oldest_responses_only() -> None:
    engine = Engine(BUDGET, history_epochs=1000)
    session = engine.open("run", [1], generated=[7, 8, 9])
    for epoch in range(60):
        # Large and small in turns: they are merged in part, so that the oldest segments can be evicted alone.
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
    assert engine.memory_bytes() > 20 * 20_000 * 4, "it cannot be less than the text alone"
    assert engine.memory_bytes() < EMPTY + 20 * 20_000 * 48, "of 6 or 12 bytes a token and about 10 a distinct one"
    assert engine.drop_namespace("run") == 20
    assert engine.memory_bytes() == EMPTY
    assert engine.stats() == {"namespaces": {}, "sessions": 0, "index_bytes": EMPTY}


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


def siblings(problem: int, responses: int = 16, size: int = 2000) -> list[np.ndarray]:
    """Returns similar responses of one problem: pieces of two stories, with single words in between."""
    rng = np.random.default_rng(problem)
    words = WORDS[rng.integers(len(WORDS) - size, size=2)[:, None] + np.arange(size)]
    story = np.repeat(rng.integers(2, size=(responses, size // 10)), 10, axis=1)
    story[rng.random(story.shape) < 0.1] = 2
    own = rng.integers(32_000, size=story.shape, dtype=np.int32)
    return list(np.where(story == 2, own, words[story % 2, np.arange(size)]))


def resident() -> int:
    """Returns the resident memory of this process after the allocator has returned free memory, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Returns the peak memory of this process since forget_peak(), in bytes."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def starve_others() -> None:
    """Puts all threads of the process on one core, where the others run only while this thread sleeps."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, os.sched_getaffinity(0))
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def ingest_alone(tokens: int, budget: int, starved: bool) -> dict[str, int]:
    """Ingests this many tokens and prints their memory; to be called in a new process."""
    siblings(0)  # so that allocations of the first use do not count
    before = resident()
    forget_peak()
    engine, most = Engine(budget), 0
    if starved:
        starve_others()
    for problem in range(tokens // 32_000):
        engine.ingest("run", [problem + 1], siblings(problem))
        most = max(most, engine.memory_bytes())
    run = engine.stats()["namespaces"]["run"]
    return {
        "claimed": engine.memory_bytes(),
        "most_claimed": most,
        "peak": peak() - before,
        "grown": resident() - before,
        "ingested": tokens // 32_000 * 16,
        "held": run["history_responses"],
        "evicted": run["evicted_by_memory"],
    }


@functools.cache
def in_a_fresh_process(tokens: int, budget: int, starved: bool = False) -> dict[str, int]:
    program = [sys.executable, __file__, json.dumps([tokens, budget, starved])]
    done = subprocess.run(program, stdout=subprocess.PIPE, check=True, timeout=300)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


@pytest.mark.parametrize("tokens", [1_000_000, 10_000_000])
def test_what_it_says_it_holds_is_what_the_process_grew_by(tokens: int) -> None:
    measured = in_a_fresh_process(tokens, 8 << 30)
    assert measured["held"] == measured["ingested"]
    assert measured["claimed"] == pytest.approx(measured["grown"], rel=0.15)


def test_what_it_says_it_holds_stays_within_the_budget() -> None:
    measured = in_a_fresh_process(*FIVE_TIMES_TOO_MUCH)
    assert measured["most_claimed"] <= FIVE_TIMES_TOO_MUCH[1]
    assert measured["held"] > 0
    assert measured["evicted"] > 0
    assert measured["held"] + measured["evicted"] == measured["ingested"]
    assert measured["claimed"] == pytest.approx(measured["grown"], rel=0.15)


@pytest.mark.parametrize("starved", [False, True], ids=["", "while-the-housekeeper-has-no-turn"])
def test_the_process_stays_within_the_budget(starved: bool) -> None:
    assert in_a_fresh_process(*FIVE_TIMES_TOO_MUCH, starved)["peak"] <= FIVE_TIMES_TOO_MUCH[1] + SLACK


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ingest_alone(*json.loads(sys.argv[1]))))
