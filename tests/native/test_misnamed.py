"""The engine counts sessions that find no history while their prompt has responses under another problem id."""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from histospec.native import Engine

PROMPT, RESPONSE = [1, 2, 3], [5, 6, 7]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(1 << 26)
    yield engine
    engine.check_integrity()


def visit(engine: Engine, prompt: list[int], opened_as: str | None, ingested_as: str | None, epoch: int = 0) -> None:
    engine.close(engine.open("run", prompt, problem=opened_as), commit=False)
    engine.ingest("run", prompt, [RESPONSE], epoch, problem=ingested_as)


def lookups(engine: Engine) -> tuple[int, int, int]:
    """Returns the hits, the misses, and of these the misnamed ones."""
    run = engine.stats()["namespaces"]["run"]
    return run["lookups_hit"], run["lookups_miss"], run["misnamed_lookups"]


def test_an_id_for_each_visit(engine: Engine) -> None:
    for epoch in range(4):
        for prompt in range(10):
            uid = f"{epoch}/{prompt}"
            visit(engine, [prompt, 9], uid, uid, epoch)
    assert lookups(engine) == (0, 40, 30)


def test_an_id_for_each_sample(engine: Engine) -> None:
    """Siblings of one step have no responses yet, and some end without any."""
    for step in range(3):
        sessions = [engine.open("run", PROMPT, problem=f"{step}/{sample}") for sample in range(8)]
        for sample, session in enumerate(sessions):
            offsets = np.array([0, len(RESPONSE)], np.int64)
            engine.step(np.array([session]), np.array(RESPONSE, np.int32), offsets, 0)
            engine.close(session, commit=sample > 3)
        engine.wait_until_built()
    assert lookups(engine) == (0, 24, 16)


@pytest.mark.parametrize(("opened", "ingested"), [(None, "uid"), ("uid", None)])
def test_an_id_on_one_side_alone(engine: Engine, opened: str | None, ingested: str | None) -> None:
    for _ in range(3):
        visit(engine, PROMPT, opened, ingested)
    assert lookups(engine) == (0, 3, 2)


def test_ids_that_return_or_name_other_prompts(engine: Engine) -> None:
    for _ in range(3):
        visit(engine, PROMPT, "a", "a")
        visit(engine, [4], "b", "b")
    for turn in range(3):
        visit(engine, PROMPT[: turn + 1], "agent", "agent")  # the prompt grows, the id stays
    fresh = count(100)
    for uid in range(9):
        visit(engine, [next(fresh)], str(uid), str(uid))
    assert lookups(engine) == (6, 12, 0)


def test_what_was_dropped_counts_for_nothing(engine: Engine) -> None:
    running = engine.open("run", PROMPT, problem="a")
    engine.ingest("run", PROMPT, [RESPONSE], problem="a")
    engine.ingest("run", PROMPT, [RESPONSE])
    engine.drop_namespace("run", keep_learned=True)
    engine.close(engine.open("run", PROMPT, problem="b"), commit=False)
    engine.close(running, commit=False)
    assert lookups(engine) == (0, 2, 0)


def test_evicted_problems_are_forgotten() -> None:
    engine = Engine(1 << 20, namespace_tokens=0)
    for uid in range(2000):
        visit(engine, [uid % 7], str(uid), str(uid))
    engine.wait_until_built()
    engine.check_integrity()
    hits, misses, misnamed = lookups(engine)
    assert engine.evicted()
    assert (hits, misses) == (0, 2000)
    assert misnamed > 1000
