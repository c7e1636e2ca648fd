"""Responses read from a store: they are older than those in the index, and evict nothing newer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from histospec.native import Engine

PROMPT = [11, 12, 13]
RNG = np.random.default_rng(0)
TEXTS = RNG.integers(0, 50_000, (40, 100), dtype=np.int32)

Response = tuple[int, int]
"""Which of TEXTS, and its epoch."""


def ingest(engine: Engine, some: Sequence[Response], prompt: Sequence[int] = PROMPT, **options: Any) -> None:
    texts, epochs = [TEXTS[text] for text, _ in some], [epoch for _, epoch in some]
    engine.ingest("run", list(prompt), texts, epochs=epochs, **options)


def history(engine: Engine, prompt: Sequence[int] = PROMPT) -> list[Response]:
    return [(int(np.flatnonzero((t == TEXTS).all(1))[0]), e) for t, e in engine.history("run", list(prompt))]


def knows(engine: Engine, *prompt: int) -> bool:
    return engine.knows("run", np.array(prompt, np.int32))


def first_drafted(engine: Engine, seed: int) -> npt.NDArray[np.int32]:
    session = engine.open("run", PROMPT, seed=seed)
    drafted = engine.step(np.array([session]), np.array([], np.int32), np.array([0, 0]))[0]
    engine.close(session, commit=False)
    return drafted


def test_what_is_stored_stands_before_what_is_newer() -> None:
    engine = Engine()
    ingest(engine, [(9, 3)])
    session = engine.open("run", PROMPT)
    engine.step(np.array([session]), TEXTS[10], np.array([0, 100]))
    engine.close(session, epoch=4)
    ingest(engine, [(5, 1), (6, 2), (7, 3)], stored=True)  # the newer part of the older ones
    ingest(engine, [(1, 0), (2, 0), (3, 1)], stored=True)
    engine.wait_until_built()
    assert history(engine) == [(1, 0), (2, 0), (3, 1), (5, 1), (6, 2), (7, 3), (9, 3), (10, 4)]
    engine.check_integrity()


def test_the_windows_hold_whatever_the_order() -> None:
    newest = [(text, 10 + text // 4) for text in range(16)]
    for windows in ({"history_epochs": 2}, {"history_responses": 8}):
        engine = Engine(**windows)
        for response in newest[8:]:
            ingest(engine, [response])
        ingest(engine, newest[4:8], stored=True)
        ingest(engine, newest[:4], stored=True)
        assert history(engine) == newest[8:]
        engine.check_integrity()


def test_a_stored_response_replaces_the_twin_of_an_older_epoch_alone() -> None:
    engine = Engine()
    ingest(engine, [(0, 5), (1, 3)], seeds=[7, 8])
    ingest(engine, [(2, 3), (3, 4), (4, 4), (5, 5)], seeds=[8, 9, 9, 7], stored=True)
    for seed, text in ((7, 0), (9, 4)):  # of one epoch, the one that came later
        assert first_drafted(engine, seed)[:5].tolist() == TEXTS[text][:5].tolist()
    engine.check_integrity()


def test_what_problems_share_stays_that_of_the_newest() -> None:
    """Stored responses fill the namespace index, and evict nothing from it."""
    full = shared(10_000, [(text, 9) for text in range(20)])
    before = drafted_elsewhere(full)
    assert len(before) > 10
    for text in range(20, 40):
        full.ingest("run", [text, 1], [LONG[text]], epoch=1, stored=True)
    assert drafted_elsewhere(full) == before


def test_of_stored_responses_problems_share_one_of_each_epoch_while_there_is_room() -> None:
    engine = Engine()
    for text in range(20):
        engine.ingest("run", [text, 1], [LONG[text], LONG[text + 20]], epochs=[1, 2], stored=True)
    shown = drafted_elsewhere(engine)
    assert len(shown) > 30
    assert {text // 20 for text in shown} == {0, 1}
    small = Engine(namespace_tokens=16_384)
    for text in range(20):
        small.ingest("run", [text, 1], [LONG[text], LONG[text + 20]], epochs=[1, 2], stored=True)
    newest = [text for text in drafted_elsewhere(small) if text >= 20]
    assert len(newest) > 15  # the newest of nearly every problem, though older ones came before
    assert len(drafted_elsewhere(small)) > len(newest)


LONG = RNG.integers(0, 50_000, (40, 500), dtype=np.int32)


def shared(tokens: int, some: Sequence[Response]) -> Engine:
    """Returns an engine whose namespace index has this size and these texts, one problem each."""
    engine = Engine(namespace_tokens=tokens)
    for text, epoch in some:
        engine.ingest("run", [text, 1], [LONG[text]], epoch=epoch)
    return engine


def drafted_elsewhere(engine: Engine) -> list[int]:
    """Returns the texts for which a session of a new problem gets drafts."""
    found = []
    for number, text in enumerate(LONG):
        session = engine.open("run", [1_000_000 + number])
        drafted = engine.step(np.array([session]), text[:50], np.array([0, 50]))[0]
        engine.close(session, commit=False)
        if drafted[:1].tolist() == text[50:51].tolist():
            found.append(number)
    return found


def test_of_what_is_read_ahead_the_last_goes_first() -> None:
    """Problems read ahead are evicted first; problems in use stay longest."""
    budget = 2 << 20
    engine = Engine(budget, namespace_tokens=0)
    ingest(engine, [(text, 0) for text in range(40)], prompt=[7, 7])
    for problem in range(10):
        ingest(engine, [(text, 0) for text in range(40)], prompt=[problem, 1], stored=True, ahead=True)
    ingest(engine, [(text, 0) for text in range(40)], prompt=[8, 8], stored=True)
    assert not engine.evicted()
    number = 0
    while not engine.evicted():
        number += 1
        ingest(engine, [(text, 0) for text in range(40)], prompt=[number, 2])
    known = [knows(engine, problem, 1) for problem in range(10)]
    assert known == sorted(known, reverse=True)
    assert known[0]
    assert not known[9]
    assert knows(engine, 7, 7)
    assert knows(engine, 8, 8)
    engine.check_integrity()


def test_what_is_read_ahead_beyond_the_budget_leaves_again() -> None:
    engine = Engine(1 << 20, namespace_tokens=0)
    number = 0
    while not engine.evicted():
        number += 1
        ingest(engine, [(text, 0) for text in range(40)], prompt=[number, 2])
    there = [p for p in range(1, number + 1) if knows(engine, p, 2)]
    for problem in range(50):
        ingest(engine, [(text, 0) for text in range(40)], prompt=[problem, 1], stored=True, ahead=True)
    assert [p for p in range(1, number + 1) if knows(engine, p, 2)] == there


def test_the_lengths_of_newer_responses_count() -> None:
    engine = Engine()
    for problem in range(256):
        engine.ingest("run", [problem, 1], [np.arange(10, dtype=np.int32)])
    for problem in range(256):
        engine.ingest("run", [problem, 2], [np.arange(90, dtype=np.int32)], stored=True)
    lengths, observations = engine.predict_length("run", [5, 5], 0, [0.5, 1.0])
    assert (lengths.tolist(), observations) == ([10.0, 10.0], 256)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": [1, 2]}, r"epochs: has 2 entries, must have 3"),
        ({"epochs": [1, None, 2]}, r"epochs\[1\]: must be an integer, is None"),
        ({"epochs": [1, "2", 2]}, r"epochs\[1\]: must be an integer"),
        ({"epochs": [1, 2**63, 2]}, r"epochs\[1\]: is outside"),
        ({"epochs": [1, 2, 1], "stored": True}, r"epochs\[2\]: is older than the one before"),
        ({"ahead": True}, r"ahead: is True but stored is False"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    engine = Engine()
    with pytest.raises(ValueError, match=says):
        engine.ingest("run", PROMPT, list(TEXTS[:3]), **options)
    assert history(engine) == []


def test_the_budget_is_told() -> None:
    assert Engine(12345).memory_budget() == 12345
