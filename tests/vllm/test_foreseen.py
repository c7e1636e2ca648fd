"""Drafts that foresee the noise of coupled sampling: with a seed, a session drafts the token that its noise prefers."""

import numpy as np
import pytest

pytest.importorskip("histospec.native", reason="this environment has the client only")
torch = pytest.importorskip("torch", reason="the noise is computed in torch")

from histospec.client.vllm.coupled.noise import noise  # noqa: E402
from histospec.native import Engine  # noqa: E402

BEFORE = list(range(100, 120))
LEFT, RIGHT = 7, 1300  # the history goes on with either
PAIR = BEFORE[-2] << 32 | BEFORE[-1]
PROMPT = [11, *BEFORE[-2:], 60, 12, 13]  # has the pair once
SEEDS = [-(2**63), 2**63 - 1, *range(-150, 150)]
# Estimates of equal alternatives differ: the sampler's choice at a smaller margin may be drafted or not.
CLEAR = 2


def history(prompt: list[int]) -> Engine:
    engine = Engine(namespace_tokens=0)
    for epoch in range(4):
        engine.ingest("run", prompt, [[*BEFORE, side, 50, 51, 52] for side in (LEFT, RIGHT)], epoch=epoch)
    return engine


def drafted(engine: Engine, prompt: list[int], said: list[int], seed: int | None) -> list[int]:
    session = engine.open("run", prompt, seed=seed)
    tokens = np.array(said, np.int32)
    draft: list[int] = engine.step(np.array([session]), tokens, np.array([0, len(said)]), 8, 0.0)[0].tolist()
    engine.close(session, commit=False)
    return draft


def margins(times: int) -> list[float]:
    """Returns by how much the noise of LEFT is larger than that of RIGHT behind the pair, for each of SEEDS."""
    seeds = torch.tensor(SEEDS)
    values = noise(seeds, torch.full((len(SEEDS),), PAIR), torch.full((len(SEEDS),), times), RIGHT + 1)
    by: list[float] = (values[:, LEFT] - values[:, RIGHT]).tolist()
    return by


@pytest.mark.parametrize(
    ("prompt", "times"), [(PROMPT[3:], 0), (PROMPT, 1)], ids=["a new pair", "a pair that the prompt has"]
)
@pytest.mark.parametrize("ahead", [0, 2], ids=["at the fork", "ahead of the fork"])
def test_the_noise_decides_between_equal_alternatives(prompt: list[int], times: int, ahead: int) -> None:
    engine = history(prompt)
    said = BEFORE[: len(BEFORE) - ahead]
    clear = [(seed, by) for seed, by in zip(SEEDS, margins(times), strict=True) if abs(by) > CLEAR]
    assert min(sum(by > 0 for _, by in clear), sum(by < 0 for _, by in clear)) > 20
    for seed, by in clear:
        assert drafted(engine, prompt, said, seed)[ahead] == (LEFT if by > 0 else RIGHT), f"seed {seed}, margin {by}"


def test_without_a_seed_every_session_drafts_the_same() -> None:
    engine = history(PROMPT)
    assert len({tuple(drafted(engine, PROMPT, BEFORE, None)) for _ in range(10)}) == 1
