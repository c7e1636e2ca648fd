"""Which aborted response a prompt continues, against a naive search."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from histospec.protocol import aborted, alternatives
from histospec.protocol.aborted import LIMIT, LINKS, SECONDS, TAIL, Aborted, AbortedResponses

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def data(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def naive(responses: list[tuple[str, list[int], list[int]]], problem: str, text: list[int]) -> int | None:
    """The shortest prompt of the responses that `text` continues, one after the other."""
    found = None
    while True:
        prompts = {
            len(prompt)
            for name, prompt, generated in responses
            if name == problem and len(prompt) < len(text) and (prompt + generated)[: len(text)] == text
        }
        if not prompts:
            return found
        found = min(prompts)
        text = text[:found]


@given(st.lists(st.tuples(st.sampled_from(["", "a"]), TOKENS, TOKENS), max_size=8), st.data())
def test_a_prompt_that_ends_in_a_response_continues_it(
    responses: list[tuple[str, list[int], list[int]]], draw: st.DataObject
) -> None:
    known: AbortedResponses[str] = AbortedResponses()
    for problem, prompt, generated in responses:
        known.add(problem, Aborted.of(data(prompt), data(generated)))
    for problem, prompt, generated in responses:
        text = (prompt + generated)[: len(prompt) + draw.draw(st.integers(0, len(generated)))]
        for asked in (text, [*text, draw.draw(st.integers(0, 1))]):
            for name in (problem, "a", ""):
                # Of several prompts that it may continue, any leads to the first one in the end.
                assert known.find(name, data(asked)) == naive(responses, name, asked)


def test_the_last_tokens_may_be_missing_and_no_more() -> None:
    known: AbortedResponses[str] = AbortedResponses()
    prompt, generated = list(range(50)), list(range(100, 400))
    known.add("", Aborted.of(data(prompt), data(generated)))
    assert len(Aborted.of(data(prompt), data(generated)).tail) == 4 * TAIL
    for received in range(301):
        expected = 50 if received > 300 - TAIL else None
        assert known.find("", data(prompt + generated[:received])) == expected, received
    assert known.find("", data([*prompt, *generated[:-1], 7])) is None
    assert known.find("another", data(prompt + generated)) is None


def test_parts_of_one_response_lead_to_its_prompt() -> None:
    known: AbortedResponses[str] = AbortedResponses()
    known.add("", Aborted.of(data([1, 2]), data([3, 4, 5])))
    known.add("", Aborted.of(data([1, 2, 3, 4, 5]), data([6])))  # of a worker that was not told
    assert known.find("", data([1, 2, 3, 4, 5, 6])) == 2


def test_a_chain_of_responses_is_followed_only_so_far() -> None:
    """Each link costs a digest of the text, and a caller can make as many as there is room for."""
    known: AbortedResponses[str] = AbortedResponses()
    text = list(range(100))
    for end in range(1, 100):
        known.add("", Aborted.of(data(text[:end]), data(text[end : end + 1])))
    assert known.find("", data(text)) == 100 - LINKS


def test_many_responses_to_one_prompt_are_not_compared_one_by_one() -> None:
    class Counted(bytes):
        compared = 0

        def __lt__(self, other: bytes) -> bool:
            Counted.compared += 1
            return bytes(self) < bytes(other)

        __gt__ = __lt__

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return bytes(self) == other

        __hash__ = bytes.__hash__

        def startswith(self, *args: Any) -> bool:
            Counted.compared += 1
            return super().startswith(*args)

    known: AbortedResponses[str] = AbortedResponses()
    for number in range(1000):
        known.add("", Aborted.of(data([1]), data([number]))._replace(tail=Counted(data([number]))))
    Counted.compared = 0
    assert known.find("", data([1, 999])) == 1
    assert known.find("", data([1, 2000])) is None
    assert Counted.compared < 100


def test_one_tenant_does_not_push_out_what_others_aborted() -> None:
    known: AbortedResponses[tuple[str, str]] = AbortedResponses(tenant=lambda problem: problem[0][0])
    known.add(("a-run", ""), Aborted.of(data([1]), data([2])))
    for number in range(LIMIT + 10):
        known.add((f"b-{number % 100}", ""), Aborted.of(data([number]), data([1])))
    assert len(known) == LIMIT
    assert known.find(("a-run", ""), data([1, 2])) == 1
    assert known.find(("b-0", ""), data([0, 1])) is None


def test_the_oldest_are_forgotten() -> None:
    now = 0.0
    known: AbortedResponses[str] = AbortedResponses(lambda: now)
    for number in range(LIMIT + 10):
        known.add("", Aborted.of(data([number]), data([1])))
    assert len(known) == LIMIT
    assert [known.find("", data([number, 1])) for number in (0, 9, 10, LIMIT)] == [None, None, 1, 1]
    now = SECONDS - 1
    known.add("", Aborted.of(data([10]), data([1])))  # again
    now = SECONDS + 1
    assert [known.find("", data([number, 1])) for number in (10, 11)] == [1, None]
    assert len(known) == 1
    known.forget(lambda problem: problem == "")
    assert len(known) == 0
    assert not known._anchors


@given(st.integers(0, 9), st.integers(1, 9), st.data())
def test_tokens_before_a_response_have_no_alternatives(before: int, tokens: int, draw: st.DataObject) -> None:
    place = (
        st.none()
        | st.just(alternatives.Place(0.5, [(7, 0.25)]))
        | st.just(alternatives.Place(0.5, [(1, 0.3), (2, 0.1)]))
    )
    places = draw.draw(st.lists(place, min_size=tokens, max_size=tokens))
    packed = alternatives.pack(places)
    longer = alternatives.preceded(packed, tokens, before)
    assert longer == alternatives.pack([None] * before + places)


def test_a_description_is_small() -> None:
    response = Aborted.of(bytes(4 * 100_000), bytes(4 * 100_000))
    assert len(response.tail) + len(response.digest) == 4 * TAIL + aborted.DIGEST
