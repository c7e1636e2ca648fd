"""A session with noise of the position drafts the token that vLLM's model runner V2 prefers with its seed."""

import numpy as np
import pytest

pytest.importorskip("histospec.native", reason="this environment has the client only")

from histospec.native import Engine
from tests.support.position_noise import KNOWN, position_noise

BEFORE = list(range(100, 120))
LEFT, RIGHT = 7, 1300  # the history goes on with either
PROMPT = [11, 60, 12, 13]
SEEDS = [-(2**63), 2**63 - 1, *range(-150, 150)]
# Estimates of equal alternatives differ: the sampler's choice at a smaller margin may be drafted or not.
CLEAR = 2


@pytest.mark.parametrize(("seed", "position", "tokens", "noise"), KNOWN)
def test_known_answers(seed: int, position: int, tokens: tuple[int, ...], noise: tuple[float, ...]) -> None:
    assert position_noise(seed, position, tokens) == pytest.approx(noise, abs=2e-6)


def history() -> Engine:
    engine = Engine(namespace_tokens=0)
    for epoch in range(4):
        engine.ingest("run", PROMPT, [[*BEFORE, side, 50, 51, 52] for side in (LEFT, RIGHT)], epoch=epoch)
    return engine


@pytest.mark.parametrize("generated", [0, 5], ids=["opened with a prompt", "opened with generated tokens"])
@pytest.mark.parametrize("ahead", [0, 2], ids=["at the fork", "ahead of the fork"])
def test_the_noise_decides_between_equal_alternatives(generated: int, ahead: int) -> None:
    engine = history()
    said = BEFORE[: len(BEFORE) - ahead]
    fork = len(PROMPT) + len(BEFORE) - 1  # the position of the token before it
    decided = [0, 0]
    for seed in SEEDS:
        left, right = position_noise(seed, fork, [LEFT, RIGHT])
        if abs(left - right) < CLEAR:
            continue
        session = engine.open("run", PROMPT, generated=said[:generated], seed=seed, position_noise=True)
        new = np.array(said[generated:], np.int32)
        tokens = engine.step(np.array([session]), new, np.array([0, len(new)]), 8, 0.0)[0].tolist()
        engine.close(session, commit=False)
        assert tokens[ahead] == (LEFT if left > right else RIGHT), f"seed {seed}, margin {left - right}"
        decided[int(left > right)] += 1
    assert min(decided) > 20


def test_without_a_seed_the_kind_of_noise_changes_nothing() -> None:
    engine = history()
    drafts = set()
    for position_noise_ in (False, True):
        session = engine.open("run", PROMPT, position_noise=position_noise_)
        tokens = engine.step(np.array([session]), np.array(BEFORE, np.int32), np.array([0, len(BEFORE)]), 8, 0.0)[0]
        drafts.add(tuple(tokens.tolist()))
        engine.close(session, commit=False)
    assert len(drafts) == 1
