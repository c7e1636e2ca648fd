"""The status tells causes apart: sampling or a policy that moved, late drafts or none asked for."""

from typing import Any

import numpy as np

from histospec.native import Engine
from histospec.server.history.namespaces import Progress
from histospec.server.observability.engine_counters import EngineReader
from histospec.server.observability.runs import Runs

PROMPT, OLD = [1, 2, 3], list(range(10, 60))
SAMPLED = "the same weights sample other text than before"
MOVED = "the policy writes other text than before"


def jump(engine: Engine, rounds: int, *, ask: bool = True) -> None:
    """Opens sessions whose tokens are those of the history, in an order in which no draft comes true."""
    offsets = np.array([0, 1], np.int64)
    for _ in range(rounds):
        session = engine.open("run", PROMPT)
        for step in range(12):
            new = np.array([OLD[7 * step % len(OLD)]], np.int32)
            engine.step(np.array([session]), new, offsets, 8 if ask else 0, 0.0)
        engine.close(session, commit=False)


def status(runs: Runs, engine: Engine, now: float, late: float = 0.0) -> tuple[dict[str, Any], bool]:
    """Returns the row of the namespace, and whether the hints blame sampling."""
    runs.add(now, EngineReader(engine).read())
    [row], [facts] = runs.rows(late, late), runs.facts()
    return row, facts.same_weights


def test_text_of_the_newest_epoch_is_the_same_weights() -> None:
    engine, runs = Engine(1 << 26), Runs(lambda _: Progress())
    engine.ingest("run", PROMPT, [OLD], epoch=3)
    jump(engine, 10)
    row, same = status(runs, engine, 0.0)
    assert row["why_not_more"].endswith(SAMPLED)
    assert same


def test_text_of_older_epochs_is_another_policys() -> None:
    engine, runs = Engine(1 << 26), Runs(lambda _: Progress())
    engine.ingest("run", PROMPT, [OLD], epoch=3)
    engine.ingest("run", [9], [OLD[:5]], epoch=4)
    jump(engine, 10)
    row, same = status(runs, engine, 0.0)
    assert row["why_not_more"].endswith(MOVED)
    assert not same


def test_an_epoch_that_moved_meanwhile_is_another_policy() -> None:
    """A trainer that ingests at the end of a step: until then, the newest responses are those of the last policy."""
    engine, runs = Engine(1 << 26), Runs(lambda _: Progress())
    engine.ingest("run", PROMPT, [OLD], epoch=3)
    jump(engine, 5)
    status(runs, engine, 0.0)
    engine.ingest("run", PROMPT, [OLD], epoch=4)
    jump(engine, 5)
    row, same = status(runs, engine, 60.0)
    assert row["why_not_more"].endswith(MOVED)
    assert not same


def test_late_drafts_and_none_asked_for() -> None:
    engine, runs = Engine(1 << 26), Runs(lambda _: Progress())
    engine.ingest("run", PROMPT, [OLD], epoch=3)
    jump(engine, 10, ask=False)
    assert "drafts come too late" in status(runs, engine, 0.0, late=0.5)[0]["why_not_more"]
    assert "no draft was asked for" in status(runs, engine, 1.0)[0]["why_not_more"]
