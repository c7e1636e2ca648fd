"""Drafts that foresee the noise of coupled sampling: with a seed, a session drafts the token that its noise prefers."""

import numpy as np
import pytest

from histospec.native import Engine

torch = pytest.importorskip("torch", reason="the noise is computed in torch")

from histospec.client.vllm.coupled.noise import noise  # noqa: E402

PROMPT = [11, 12, 13]
BEFORE = list(range(100, 120))
LEFT, RIGHT = 7, 1300  # the history goes on with either
SEEDS = [-(2**63), 2**63 - 1, *range(-30, 30)]


def history() -> Engine:
    engine = Engine(namespace_tokens=0)
    for epoch in range(4):
        engine.ingest("run", PROMPT, [[*BEFORE, side, 50, 51, 52] for side in (LEFT, RIGHT)], epoch=epoch)
    return engine


def drafted(engine: Engine, said: list[int], seed: int | None) -> list[int]:
    session = engine.open("run", PROMPT, seed=seed)
    tokens = np.array(said, np.int32)
    draft: list[int] = engine.step(np.array([session]), tokens, np.array([0, len(said)]), 8, 0.0)[0].tolist()
    engine.close(session, commit=False)
    return draft


@pytest.mark.parametrize("ahead", [0, 6])
def test_a_seed_decides_between_equal_alternatives(ahead: int) -> None:
    """Also where the fork lies inside the draft."""
    engine = history()
    seeds = torch.tensor(SEEDS)
    pair = torch.full((len(SEEDS),), BEFORE[-2] << 32 | BEFORE[-1])
    values = noise(seeds, pair, torch.zeros_like(seeds), RIGHT + 1)
    margin = (values[:, LEFT] - values[:, RIGHT]).tolist()
    chosen = [drafted(engine, BEFORE[: len(BEFORE) - ahead], seed)[ahead] for seed in SEEDS]
    clear = [(side, by) for side, by in zip(chosen, margin, strict=True) if abs(by) > 0.3]
    assert len(clear) > 40
    assert [side for side, _ in clear] == [LEFT if by > 0 else RIGHT for _, by in clear]


def test_a_repeated_pair_has_other_noise() -> None:
    engine = history()
    values = noise(torch.arange(40), torch.full((40,), BEFORE[-2] << 32 | BEFORE[-1]), torch.ones(40).long(), RIGHT + 1)
    said = [*BEFORE, 3, *BEFORE]
    for seed in range(40):
        margin = float(values[seed, LEFT] - values[seed, RIGHT])
        if abs(margin) > 1:
            assert drafted(engine, said, seed)[0] == (LEFT if margin > 0 else RIGHT)
