"""Coupled sampling: a session drafts from its twin, the last response with the same seed, from client to store."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from histospec.client import Breaker, DraftClient, Response
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

PROMPT = [1, 2, 3]
SHARED = list(range(100, 120))
TEXTS = {seed: [*SHARED, *np.random.default_rng(seed).integers(1000, 30_000, 200).tolist()] for seed in (7, 8)}
MISSED = 'histospec_twin_lookups_total{namespace="run",result="miss"}'
FOUND = 'histospec_twin_lookups_total{namespace="run",result="hit"}'
DRAFTED = 'histospec_source_draft_tokens_total{namespace="run",source="twin"}'


@pytest.fixture
def open_client() -> Iterator[Callable[[Server], DraftClient]]:
    clients = []

    def open_(server: Server) -> DraftClient:
        quick = Breaker(cooldown=0.05, cooldown_max=0.2)
        clients.append(DraftClient(server.endpoint, "run", deadline=5.0, breaker=quick))
        return clients[-1]

    yield open_
    for client in clients:
        client.shutdown()


def roll_out(client: DraftClient, epoch: int) -> None:
    sessions = client.open([PROMPT] * len(TEXTS), seeds=list(TEXTS))
    client.step(sessions, list(TEXTS.values()), max_tokens=0)
    client.close(sessions, epochs=epoch)
    client.flush(30)
    assert client.stats().pending_commits == 0


def draft(client: DraftClient, seed: int | None, begun: int = 1) -> list[int]:
    """Returns the draft of a session with seed 7 after its first tokens."""
    (session,) = client.open([PROMPT], seeds=[seed])
    (drafted,) = client.step([session], [TEXTS[7][:begun]], max_tokens=64)
    client.close([session], commit=False)
    tokens: list[int] = drafted.tokens.tolist()
    return tokens


def test_a_session_is_drafted_the_text_of_its_seed(
    server: Server, open_client: Callable[[Server], DraftClient]
) -> None:
    """
    1. Two seeds give two texts with the same beginning.
    2. A session with either seed drafts its text, also after the two diverge; an unknown seed has no effect.
    3. Ingested twins work the same way, and the newest one counts.
    """
    client = open_client(server)
    roll_out(client, epoch=0)
    assert draft(client, 7) == TEXTS[7][1:65]
    assert draft(client, 8) == TEXTS[8][1:65]
    assert draft(client, 9) == draft(client, None)
    newer = [TEXTS[7][0], *(token + 50_000 for token in TEXTS[7][1:])]
    client.ingest(PROMPT, [Response(newer, seed=7), Response(TEXTS[7][::-1], seed=8)], epoch=1)
    assert draft(client, 7) == newer[1:65]
    assert [r.seed for r in client.history(PROMPT)] == [7, 8, 7, 8]
    samples = server.metrics()
    assert (samples[FOUND], samples[MISSED]) == (3, 3)


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_seeds_survive_a_server_that_is_killed(
    start_server: Starter, open_client: Callable[[Server], DraftClient], store: str, request: pytest.FixtureRequest
) -> None:
    """
    1. A session with a seed runs while its server is killed and restarted.
    2. The session keeps its seed, and its commit has it. A new session with the seed drafts the twin, as before.
    """
    flags = () if store == "sqlite" else ("--store", request.getfixturevalue("redis_server").url)
    server = start_server(*flags)
    client = open_client(server)
    roll_out(client, epoch=0)
    (running,) = client.open([PROMPT], seeds=[-7])
    client.step([running], [[5, 6]])
    server.kill()
    server.start()
    assert server.metrics().get(DRAFTED, 0) == 0
    eventually(lambda: draft(open_client(server), 7) == TEXTS[7][1:65], "the twin is not there")
    assert server.metrics()[DRAFTED] >= 64
    eventually(lambda: len(client.step([running], [[]], max_tokens=0)) == 1 and client.stats().reopened)
    client.step([running], [[7]], max_tokens=0)
    client.close([running], epochs=1)
    client.flush(30)
    assert [(r.seed, list(r.tokens[:3])) for r in client.history(PROMPT)] == [
        *((seed, text[:3]) for seed, text in TEXTS.items()),
        (-7, [5, 6, 7]),
    ]


def test_a_later_turn_is_no_twin_of_the_first(server: Server, open_client: Callable[[Server], DraftClient]) -> None:
    """Both turns have one seed and the problem stores both; even after a restart, each drafts from its own start."""
    client = open_client(server)
    roll_out(client, epoch=0)
    later = [*PROMPT, *TEXTS[7], 9]
    (session,) = client.open([later], seeds=[7])
    client.step([session], [TEXTS[8][::-1]], max_tokens=0)
    client.close([session], epochs=0)
    client.flush(30)
    assert [(r.seed, r.tokens[-1]) for r in client.history(PROMPT)][-1] == (None, TEXTS[8][0])
    for _ in range(2):
        assert draft(client, 7) == TEXTS[7][1:65]
        server.restart()
        client = open_client(server)
