"""The format of alternatives, and how the adapter gathers them; the server's checks are in test_malformed."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from histospec.client import DraftClient, Response
from histospec.client.engines.alternatives import Gathered, Step
from histospec.protocol.alternatives import LEVELS_PER_NAT, TOKENS, Place, fault, joined, pack, unpack
from tests.support.servers import Server

PROBABILITY = st.floats(2.0**-20, 1)
PLACES = st.lists(
    st.none()
    | st.builds(
        Place, PROBABILITY, st.lists(st.tuples(st.integers(0, TOKENS - 1), PROBABILITY), min_size=1, max_size=3)
    ),
    max_size=30,
)


@given(PLACES)
def test_places_come_back_within_half_a_level(places: list[Place | None]) -> None:
    packed = pack(places)
    assert fault(packed, len(places)) == ""
    assert bool(packed) is any(places)
    for found, place in zip(unpack(packed, len(places)), places, strict=True):
        if place is None or found is None:
            assert found is place
            continue
        assert [token for token, _ in found.others] == [token for token, _ in place.others]
        wanted, kept = ([each.sampled, *(p for _, p in each.others)] for each in (place, found))
        pairs = zip(wanted, kept, strict=True)
        assert all(abs(math.log(a) - math.log(b)) <= 0.5 / LEVELS_PER_NAT + 1e-9 for a, b in pairs)


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        (Place(float("nan"), [(1, 0.5)]), r"alternatives\[1\]: the sampled token: probability nan is outside \(0, 1\]"),
        (Place(0.5, [(1, 0.0)]), r"alternatives\[1\]: token 1: probability 0.0 is outside"),
        (Place(0.5, [(1, 1.5)]), r"alternatives\[1\]: token 1: probability 1.5 is outside"),
        (Place(0.5, [(TOKENS, 0.5)]), r"alternatives\[1\]: token 16777216 is outside \[0, 16777216\)"),
        (Place(0.5, [(-1, 0.5)]), r"alternatives\[1\]: token -1 is outside"),
        (Place(0.2, [(1, 0.2)] * 4), r"alternatives\[1\]: 4 are more than the limit of 3"),
    ],
)
def test_what_is_no_alternative_is_refused(place: Place, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        pack([None, place])


def test_every_flaw_of_the_bytes_is_named() -> None:
    packed = pack([None, Place(0.5, [(1, 0.25)]), None, None, Place(0.5, [(1, 0.2), (2, 0.1)])])
    assert fault(packed, 5) == ""
    assert fault(packed, 4) == "16 bytes, but its counts need 6"
    assert fault(packed, 100) == "16 bytes are fewer than the 25 of the counts of 100 tokens"
    assert fault(packed[:-1], 5) == "15 bytes, but its counts need 16"
    assert fault(packed[:1] + b"\x06" + packed[2:], 5) == "a place behind the 5 tokens has alternatives"
    with pytest.raises(ValueError, match="alternatives: 15 bytes"):
        unpack(packed[:-1], 5)


def test_gathered_steps_are_those_of_the_tokens_that_were_kept() -> None:
    """Against a list with an entry per token; vLLM discards tokens now and then."""
    rng = random.Random(0)
    for _ in range(300):
        gathered, before = Gathered(), rng.randrange(3)
        kept: list[bytes] = []
        for _ in range(rng.randrange(12)):
            del kept[rng.randrange(len(kept) + 1) if rng.random() < 0.2 else len(kept) :]
            groups = [bytes([rng.randrange(256)] * (1 + 4 * n)) if n else b"" for n in rng.choices(range(4), k=5)]
            groups = groups[: rng.randint(1, 5)]
            gathered.put(len(kept), Step(bytes(len(group) // 4 for group in groups), b"".join(groups)))
            kept += groups
        tokens = rng.randrange(len(kept) + 1)  # vLLM cuts the end
        every = [b""] * before + kept[:tokens]
        counts = np.array([len(group) // 4 for group in every], np.uint8)
        assert gathered.packed(before, before + tokens) == (joined(counts, b"".join(every)) or None)


OTHERS = pack([None, Place(0.4, [(9, 0.3), (8, 0.2)]), None])


def test_a_response_with_alternatives_survives_a_kill(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with DraftClient(server.endpoint, "run", deadline=5) as client:
        client.ingest([1, 2], [Response([3, 4, 5], alternatives=OTHERS), Response([3, 4, 6])], epoch=1)
        (session,) = client.open([[1, 2]])
        client.step([session], [[3, 7, 8]], max_tokens=4)
        client.finish([session], epochs=1, alternatives=[OTHERS])
        client.flush(10)
    server.kill()
    server.restart()
    with DraftClient(server.endpoint, "run", deadline=5) as client:
        found = [(response.tokens.tolist(), response.alternatives) for response in client.history([1, 2])]  # type: ignore[union-attr]
    assert found == [([3, 4, 5], OTHERS), ([3, 4, 6], None), ([3, 7, 8], OTHERS)]


@pytest.mark.parametrize(
    ("alternatives", "complaint"),
    [
        ([[0.5]], r"alternatives\[0\]: must be bytes that .*pack made, is list"),
        ([OTHERS + b"x"], r"alternatives\[0\]: 11 bytes, but its counts need 10"),
        ([OTHERS, OTHERS], "alternatives: 2 .* for 1 session"),
        (OTHERS, "alternatives"),
    ],
)
def test_a_wrong_argument_closes_nothing(alternatives: Any, complaint: str) -> None:
    with DraftClient("127.0.0.1:9", "run") as client:
        (session,) = client.open([[1]], generated=[[1, 2, 3]])
        with pytest.raises(ValueError, match=complaint):
            client.finish([session], alternatives=alternatives)
        client.finish([session])
