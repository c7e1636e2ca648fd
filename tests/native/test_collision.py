"""Prompts with the same hash are different problems: the engine compares tokens, too. Takes about 1 s."""

from pathlib import Path

import numpy as np
import pytest

from histospec.native import Engine

SOURCE = Path(__file__).parents[2] / "native" / "src" / "registry" / "problem.h"
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# std::hash of an empty string in libstdc++, where the hash of a prompt starts.
START = np.uint64(0x553E93901E462A6E)


def mixed(state: np.ndarray) -> np.ndarray:
    """One round of the engine's hash of prompts, after the token is added."""
    state = state * MULTIPLIER
    return state ^ (state >> np.uint64(29))


def colliding_prompts(count: int) -> list[tuple[list[int], list[int]]]:
    """Returns pairs of prompts with the same 64-bit hash.

    A round is a bijection of the state. States whose upper 33 bits agree after two tokens become equal before the third
    round, if the third tokens make up for the lower 31. Birthdays find many such pairs. (One token is not enough: a
    golden-ratio multiplier keeps its multiples apart.)
    """
    states = mixed(mixed(START ^ np.arange(1_000_000, dtype=np.uint64)) ^ np.uint64(4))
    upper = states >> np.uint64(31)
    order = np.argsort(upper)
    neighbours = np.flatnonzero(upper[order][1:] == upper[order][:-1])[:count]
    pairs = []
    for one, other in zip(order[neighbours], order[neighbours + 1], strict=True):
        difference = int(states[one] ^ states[other])
        pairs.append(([int(one), 4, 5, 9], [int(other), 4, 5 ^ difference, 9]))
    return pairs


def state_after(prompt: list[int]) -> int:
    state = np.array([START])
    for token in prompt:
        state = mixed(state ^ np.uint64(token))
    return int(state[0])


PAIRS = colliding_prompts(5)


def test_the_pairs_collide() -> None:
    assert len(PAIRS) == 5
    for one, other in PAIRS:
        assert one != other
        assert max(one + other) < 2**31
        assert state_after(one) == state_after(other)
    # If this fails, the engine's hash has changed: these prompts no longer collide, and the test needs others.
    assert "hash = (hash ^ static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15u;" in SOURCE.read_text()
    assert "return hash ^ hash >> 29;" in SOURCE.read_text()


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_problems_of_one_hash_are_apart(one: list[int], other: list[int]) -> None:
    engine = Engine(1 << 28)
    engine.ingest("run", one, [[100, 101, 102, 103]], epoch=1)
    assert engine.history("run", other) == []
    engine.ingest("run", other, [[100, 101, 202, 203]], epoch=2)
    for prompt, response in ((one, [100, 101, 102, 103]), (other, [100, 101, 202, 203])):
        ((tokens, _),) = engine.history("run", prompt)
        assert tokens.tolist() == response
        session = engine.open("run", prompt, generated=[100, 101])
        step = np.array([session]), np.array([], np.int32), np.array([0, 0])
        assert engine.step(*step)[0].tolist() == response[2:]
    assert engine.stats()["namespaces"]["run"]["problems"] == 2
    # Sessions of the two problems are not siblings.
    writer, reader = engine.open("run", one), engine.open("run", other, generated=[7, 8])
    engine.step(np.array([writer]), np.array([7, 8, 9, 10, 11], np.int32), np.array([0, 5]))
    assert engine.step(np.array([reader]), np.array([], np.int32), np.array([0, 0]), verify_cost=0.0)[0].size == 0
    engine.check_integrity()


def test_colliding_prompts_are_not_shared_with_another_namespace() -> None:
    engine = Engine(memory_bytes=1 << 26)
    for one, other in PAIRS:
        engine.ingest("one", np.array(one, np.int32), [np.array([7], np.int32)])
        engine.ingest("other", np.array(other, np.int32), [np.array([7], np.int32)])
    assert engine.shared_prompts("one") == (len(PAIRS), {})
    engine.ingest("other", np.array(PAIRS[0][0], np.int32), [np.array([7], np.int32)])
    assert engine.shared_prompts("one") == (len(PAIRS), {"other": 1})
