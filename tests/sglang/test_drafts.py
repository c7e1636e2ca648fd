"""SGLang with drafts writes what it writes without, and the history has it, token for token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from histospec.client import DraftClient, Response
from tests.sglang.conftest import NAMESPACE, NGRAM, Engine
from tests.support.clients import texts
from tests.support.servers import Server, Starter
from tests.support.slow_link import SlowLink
from tests.support.tiny_policy import ALPHABET, VOCABULARY
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def written(plain: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What the policy writes to the prompts, without speculation."""
    return plain.generate(prompts)


Alone = Callable[..., tuple[Engine, DraftClient]]


@pytest.fixture
def alone(start_engine: Callable[..., Engine], shared_server: Server) -> Iterator[Alone]:
    """alone(name, **arguments of SGLang) -> an engine and a client in a namespace that no other test writes to."""
    with ExitStack() as clients:

        def start(name: str, **arguments: Any) -> tuple[Engine, DraftClient]:
            client = clients.enter_context(DraftClient(shared_server.endpoint, namespace=name, deadline=5))
            return start_engine(shared_server.endpoint, {"HISTOSPEC_NAMESPACE": name}, **NGRAM | arguments), client

        yield start


@pytest.fixture
def own(prompts: list[list[int]], request: pytest.FixtureRequest) -> list[list[int]]:
    """Prompts of this test alone."""
    salt = [ord(letter) % VOCABULARY for letter in request.node.name[-16:]]
    return [salt + prompt for prompt in prompts]


def steps(answers: Sequence[Any]) -> int:
    """In how many steps the answers were verified."""
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def outputs(answers: Sequence[Any]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def wrong(text: Sequence[int]) -> list[int]:
    """The text with every fourth token changed."""
    return [(token + 1) % VOCABULARY if place % 4 == 3 else token for place, token in enumerate(text)]


def test_right_drafts(
    plain: Engine, drafting: Engine, own: list[list[int]], client: DraftClient, shared_server: Server
) -> None:
    expected = plain.generate(own)
    drafting.start(own)
    first = drafting.wait()
    drafting.start(own)
    second = drafting.wait()
    assert outputs(first) == outputs(second) == expected
    assert steps(second) < 0.4 * steps(first)  # 39 tokens, at most 9 in a step
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in second)  # the radix cache is on
    for prompt, text in zip(own, expected, strict=True):
        assert texts(client.history(prompt)) == [text, text]


def test_wrong_drafts(plain: Engine, alone: Alone, own: list[list[int]]) -> None:
    expected = plain.generate(own)
    drafting, client = alone("wrong")
    for prompt, text in zip(own, expected, strict=True):
        client.ingest(prompt, [Response(wrong(text))], epoch=0)
    drafting.start(own)
    answers = drafting.wait()
    assert outputs(answers) == expected
    accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    assert 0 < accepted < 0.8 * 39 * len(own)


def test_tokens_of_another_tokenizer(
    plain: Engine, drafting: Engine, own: list[list[int]], client: DraftClient
) -> None:
    expected = plain.generate(own)
    for prompt, text in zip(own, expected, strict=True):
        client.ingest(prompt, [Response([token + 7 * VOCABULARY if n % 4 else token for n, token in enumerate(text)])])
    assert drafting.generate(own) == expected


def test_a_control_that_must_fail(
    start_engine: Callable[..., Engine],
    shared_server: Server,
    own: list[list[int]],
    plain: Engine,
    client: DraftClient,
) -> None:
    """If verification accepted every token, wrong drafts would show: they reach the places that SGLang verifies."""
    expected = plain.generate(own)
    for prompt, text in zip(own, expected, strict=True):
        client.ingest(prompt, [Response(wrong(text))], epoch=0)
    careless = start_engine(shared_server.endpoint, {"TESTBED_ACCEPTS_ALL": "1"}, **NGRAM)
    assert careless.generate(own) != expected


def test_several_samples_of_a_prompt(
    plain: Engine, drafting: Engine, own: list[list[int]], client: DraftClient
) -> None:
    expected = plain.generate(own)
    for visit in (1, 2):
        assert drafting.generate(own, n=3) == [[text] * 3 for text in expected]
        for prompt, text in zip(own, expected, strict=True):
            assert texts(client.history(prompt)) == [text] * 3 * visit


def test_stop_tokens_and_lengths(plain: Engine, drafting: Engine, own: list[list[int]], client: DraftClient) -> None:
    """They end in the middle of an accepted draft, too: the history knows the text beyond them."""
    whole = plain.generate(own)
    drafting.generate(own)
    for number, (prompt, text) in enumerate(zip(own, whole, strict=True)):
        stop = text[11 + number]
        end = text.index(stop) + 1
        assert drafting.generate([prompt], stop_token_ids=[stop], ignore_eos=False) == [text[:end]]
        assert drafting.generate([prompt], max_new_tokens=17 + number) == [text[: 17 + number]]
        assert sorted(texts(client.history(prompt))) == sorted([text, text[:end], text[: 17 + number]])


def test_stop_strings(plain: Engine, drafting: Engine, own: list[list[int]], client: DraftClient) -> None:
    whole = plain.generate(own)
    drafting.generate(own)
    for number, (prompt, text) in enumerate(zip(own, whole, strict=True)):
        stop = "".join(ALPHABET[token] for token in text[11 + number : 13 + number])
        expected = plain.generate([prompt], stop=[stop])[0]
        assert drafting.generate([prompt], stop=[stop]) == [expected]
        assert expected == text[: len(expected)]
        assert len(expected) <= 13 + number
        assert sorted(texts(client.history(prompt))) == sorted([text, expected])


def test_options(drafting: Engine, own: list[list[int]], client: DraftClient) -> None:
    for epoch in (5, 6):
        options = {"histospec": {"problem": "task-17", "epoch": epoch}}
        text = drafting.generate(own[:1], custom_params=options)[0]
    found = client.history(own[0], problem="task-17")
    assert [response.epoch for response in found] == [5, 6]
    assert texts(found) == [text, text]
    drafting.generate(own[1:2], custom_params={"histospec": False})
    assert client.history(own[1]) == []


def test_requests_that_are_no_rollouts(drafting: Engine, own: list[list[int]], client: DraftClient) -> None:
    drafting.generate(own, max_new_tokens=1)
    assert [client.history(prompt) for prompt in own] == [[]] * len(own)


def test_aborted_and_continued(plain: Engine, drafting: Engine, own: list[list[int]], client: DraftClient) -> None:
    """The parts of a response are one response of the first prompt."""
    length = 300
    expected = plain.generate(own[:4], max_new_tokens=length)
    drafting.start(own[:4], rid="part", max_new_tokens=length)
    drafting.do("pause", mode="abort")  # as trainers do before new weights
    parts = drafting.wait()
    drafting.do("continue")
    written = outputs(parts)
    assert any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in parts)
    rest = drafting.generate([prompt + text for prompt, text in zip(own, written, strict=False)], max_new_tokens=length)
    for prompt, text, part, more in zip(own, expected, written, rest, strict=False):
        assert part == text[: len(part)]
        if len(part) < length:
            assert texts(client.history(prompt)) == [part + more]
            assert client.history(prompt + part) == [] or not part


def test_an_abort_of_one_request(drafting: Engine, own: list[list[int]], client: DraftClient) -> None:
    drafting.start(own[:3], rid="one", max_new_tokens=300)
    drafting.do("abort", rid="one1")
    answers = drafting.wait()
    assert [len(text) for text in outputs(answers)][::2] == [300, 300]
    assert [len(client.history(prompt)) for prompt in own[:3]] == [1, 0, 1]


def test_branches(plain: Engine, alone: Alone, prompts: list[list[int]]) -> None:
    """Where the history forks, a place holds the runner-up: the same text in fewer steps.

    A long text soon repeats itself, and a branch takes a place from a chain that is right: that may cost a step.
    """
    engines = [alone(f"breadth {n}", speculative_ngram_max_bfs_breadth=n) for n in (1, 2)]
    for tokens, most in ((5, 0.7), (100, 1.05)):
        own = [[tokens % VOCABULARY, *prompt] for prompt in prompts]
        expected = plain.generate(own, max_new_tokens=tokens)
        count = []
        for engine, client in engines:
            for prompt, text in zip(own, expected, strict=True):
                client.ingest(prompt, [Response(known) for known in (wrong(text), text, wrong(text))], epoch=0)
            engine.start(own, max_new_tokens=tokens)
            answers = engine.wait()
            assert outputs(answers) == expected
            assert [texts(client.history(prompt))[3:] for prompt in own] == [[text] for text in expected]
            count.append(steps(answers))
        chains, branches = count
        assert branches <= most * chains


def test_new_weights(
    drafting: Engine, plain: Engine, own: list[list[int]], client: DraftClient, tiny_model: str
) -> None:
    """Requests in the queue and running ones go on with new weights, and count as theirs."""
    length = 200
    expected = plain.generate(own, max_new_tokens=length)
    drafting.start(own, max_new_tokens=length)
    drafting.do("pause", mode="retract")
    # Without a flush, as trainers do it: 0.5.15 refuses it while requests wait.
    assert drafting.do("update", model_path=tiny_model, weight_version="step7", flush_cache=False)[0]
    drafting.do("continue")
    assert outputs(drafting.wait()) == expected
    assert [response.epoch for prompt in own for response in client.history(prompt)] == [7] * len(own)


def test_late_drafts(
    start_engine: Callable[..., Engine], shared_server: Server, written: list[list[int]], prompts: list[list[int]]
) -> None:
    with SlowLink(shared_server.endpoint, 0.2) as link:
        engine = start_engine(link.address, {"HISTOSPEC_DEADLINE": "0.001"}, **NGRAM)
        assert engine.generate(prompts) == engine.generate(prompts) == written


def test_a_server_that_is_killed(
    start_engine: Callable[..., Engine], start_server: Starter, written: list[list[int]], prompts: list[list[int]]
) -> None:
    server = start_server()
    engine = start_engine(server.endpoint, **NGRAM)
    assert engine.generate(prompts) == written
    engine.start(prompts, max_new_tokens=200)
    server.kill()
    assert [text[:40] for text in outputs(engine.wait())] == written
    assert engine.generate(prompts) == written
    server.start()
    with DraftClient(server.endpoint, namespace=NAMESPACE) as client:

        def back() -> bool:
            assert engine.generate(prompts[:1]) == written[:1]
            return len(client.history(prompts[0])) >= 4  # those of the outage, too

        eventually(back)
    engine.start(prompts)
    assert steps(engine.wait()) < 0.5 * 39 * len(prompts)


def test_enabled_without_arguments(
    start_engine: Callable[..., Engine], shared_server: Server, written: list[list[int]], prompts: list[list[int]]
) -> None:
    engine = start_engine(shared_server.endpoint, {"HISTOSPEC_ENABLE": "1", "HISTOSPEC_DRAFT_TOKENS": "8"})
    assert engine.generate(prompts) == written
    engine.start(prompts)
    answers = engine.wait()
    assert outputs(answers) == written
    assert steps(answers) < 0.5 * 39 * len(prompts)


def test_without_an_endpoint_nothing_changes(
    start_engine: Callable[..., Engine], written: list[list[int]], prompts: list[list[int]]
) -> None:
    engine = start_engine(**NGRAM)
    engine.start(prompts)
    answers = engine.wait()
    assert outputs(answers) == written
    assert not any("HistoSpec" in line for line in engine.log)


def test_two_tensor_parallel_ranks(
    start_engine: Callable[..., Engine],
    shared_server: Server,
    plain: Engine,
    own: list[list[int]],
    client: DraftClient,
) -> None:
    """Both verify the drafts of the first. With drafts that differ they would write other texts, or wait for ever."""
    expected = plain.generate(own)
    for prompt, text in zip(own[:4], expected, strict=False):
        client.ingest(prompt, [Response(wrong(text))], epoch=0)
    engine = start_engine(shared_server.endpoint, {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, tp_size=2, **NGRAM)
    for _ in range(2):
        engine.start(own)
        answers = engine.wait()
        assert outputs(answers) == expected
    assert steps(answers) < 0.4 * 39 * len(own)
    assert sorted(map(len, (client.history(prompt) for prompt in own))) == [2] * 4 + [3] * 4
