"""Histories in process, and all kinds of responses that a run may store, to compare with what clients find later."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import NamedTuple

import numpy as np

from histospec.client import DraftClient, Response
from histospec.native import Engine
from histospec.server.history.history import History
from histospec.server.history.tenants import Tenants
from histospec.server.security.access import Access
from histospec.server.stores.interface import Store


@asynccontextmanager
async def opened(store: Store, engine: Engine | None = None, watch_seconds: float = 60.0) -> AsyncIterator[History]:
    """A history as of a server that has just started: it loads its store in the background."""
    engine = engine or Engine(1 << 26, namespace_tokens=0)
    history = History(engine, store, 4096, Tenants(Access(None), engine), watch_seconds)
    await history.load()
    try:
        yield history
    finally:
        await history.close()


class Written(NamedTuple):
    """A problem as its clients know it: one of its prompts, its name, and everything that was ingested, by epoch."""

    namespace: str
    prompt: tuple[int, ...]
    name: str | None
    responses: dict[int, list[Response]]


def writings(seed: int, namespaces: Sequence[str] = ("run-1", "run-2 ❤"), problems: int = 12) -> list[Written]:
    """Problems with and without names, some of one prompt; responses with and without what may be known of them."""
    random = Random(seed)
    found = []
    for namespace in namespaces:
        for number in range(problems):
            prompt = tuple(random.randrange(1 << 17) for _ in range(random.randint(1, 20))) if number % 4 else (1, 2, 3)
            name = f"problem {number} ü" if number % 2 == 0 else None
            epochs = {epoch: [_response(random) for _ in range(random.randint(1, 3))] for epoch in range(3)}
            found.append(Written(namespace, prompt, name, epochs))
    return found


def _response(random: Random) -> Response:
    size = random.randint(1, 40)
    tokens = [random.randrange(1 << 31) for _ in range(size)]
    logprobs = np.array([-random.expovariate(1.0) for _ in range(size)], "<f4")
    return Response(
        tokens,
        logprobs=random.choice((None, logprobs)),
        reward=random.choice((None, -1.5, 0.1)),
        generated=random.choice((None, [random.random() < 0.7 for _ in range(size)])),
        seed=random.choice((None, 0, -(2**63), random.getrandbits(62))),
    )


def write(endpoint: str, writings: Sequence[Written], token: str | None = None) -> None:
    """Ingests them all; a named problem also comes with another prompt."""
    for namespace in dict.fromkeys(written.namespace for written in writings):
        with DraftClient(endpoint, namespace, token=token, deadline=60.0) as client:
            for written in writings:
                for epoch, responses in written.responses.items() if written.namespace == namespace else ():
                    prompt = (*written.prompt, 7) if written.name and epoch == 1 else written.prompt
                    client.ingest(prompt, responses, epoch, written.name)


def found(endpoint: str, writings: Sequence[Written], token: str | None = None) -> list[list[tuple[object, ...]]]:
    """What clients are told of each problem, in a form that can be compared."""
    answers = []
    for written in writings:
        with DraftClient(endpoint, written.namespace, token=token, deadline=60.0) as client:
            answers.append([_plain(response) for response in client.history(written.prompt, written.name)])
    return answers


def expected(writings: Sequence[Written]) -> list[list[tuple[object, ...]]]:
    return [
        [_plain(response, epoch) for epoch, responses in sorted(written.responses.items()) for response in responses]
        for written in writings
    ]


def _plain(response: Response, epoch: int | None = None) -> tuple[object, ...]:
    """All that is known of a response, as numbers that compare by their bits."""
    logprobs = None if response.logprobs is None else np.asarray(response.logprobs, "<f4").tobytes()
    reward = None if response.reward is None else float(np.float32(response.reward))
    generated = None if response.generated is None else np.asarray(response.generated, bool).tolist()
    return (
        np.asarray(response.tokens).tolist(),
        response.epoch if epoch is None else epoch,
        logprobs,
        reward,
        None if generated is None or all(generated) else generated,
        response.seed,
    )
