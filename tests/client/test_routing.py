"""Rendezvous hashing: the same in all versions, even, and stable when shards join and leave."""

from collections import Counter

import numpy as np

from histospec.protocol.placement import place, problem_digest, weight

PROMPT = np.array([1, 2, 3], "<i4").tobytes()
NAMES = ["shard-0", "shard-1", "shard-2"]


def test_golden_values() -> None:
    """If this fails, clients of two versions look for a problem on two shards. Never change these values."""
    assert problem_digest("run-1", PROMPT).hex() == "61f8b0f0ea79044f24ab8f5c40d0a4fb"
    assert problem_digest("run-1", PROMPT, "task-7").hex() == "f6f6493fe19369862faa3ee4b1cc04f1"
    assert weight(problem_digest("run-1", PROMPT), "shard-0") == 5196222017587647121
    places = [place(problem_digest("run-1", i.to_bytes(4, "little")), NAMES) for i in range(12)]
    assert places == [
        0,
        0,
        0,
        1,
        0,
        2,
        1,
        0,
        2,
        1,
        0,
        2,
    ]


def test_explicit_id_alone_names_the_problem() -> None:
    assert problem_digest("run-1", PROMPT, "task-7") == problem_digest("run-1", PROMPT + PROMPT, "task-7")
    assert problem_digest("run-1", PROMPT) != problem_digest("run-2", PROMPT)


def test_order_of_shards_does_not_matter() -> None:
    for i in range(100):
        digest = problem_digest("run-1", i.to_bytes(4, "little"))
        assert NAMES[place(digest, NAMES)] == NAMES[::-1][place(digest, NAMES[::-1])]


def test_even_and_only_the_lost_shard_moves() -> None:
    digests = [problem_digest("run-1", i.to_bytes(4, "little")) for i in range(3000)]
    before = [NAMES[place(d, NAMES)] for d in digests]
    after = [NAMES[:2][place(d, NAMES[:2])] for d in digests]
    assert all(900 < n < 1100 for n in Counter(before).values())
    assert all(b == a for b, a in zip(before, after, strict=True) if b != "shard-2")
