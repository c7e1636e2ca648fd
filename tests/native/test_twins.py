"""Seeds of coupled sampling: sessions draft from the last response of their seed. Takes about 1 s."""

from typing import Any

import numpy as np
import pytest

from histospec.native import Engine

PROMPT = [11, 12, 13]
RNG = np.random.default_rng(0)
FIRST, SECOND = RNG.integers(0, 5000, (2, 400), dtype=np.int32)


def advance(engine: Engine, session: int, tokens: np.ndarray, max_tokens: int = 64) -> list[int]:
    ids, offsets = np.array([session]), np.array([0, len(tokens)])
    draft: list[int] = engine.step(ids, tokens.astype(np.int32), offsets, max_tokens, 0.02)[0].tolist()
    return draft


def counted(engine: Engine) -> Any:
    return engine.stats()["namespaces"]["run"]


@pytest.mark.parametrize("seeds", [[-(2**63), 2**63 - 1], (np.int64(0), 1), np.array([5, -5])])
def test_a_session_drafts_what_its_seed_gave(seeds: list[int]) -> None:
    engine = Engine()
    engine.ingest("run", PROMPT, [FIRST, SECOND], epoch=1, seeds=seeds)
    for seed, said in zip(seeds, (FIRST, SECOND), strict=True):
        session = engine.open("run", PROMPT, seed=seed)
        draft = advance(engine, session, said[:5])
        assert len(draft) > 30
        assert draft == said[5 : 5 + len(draft)].tolist()
    run = counted(engine)
    assert (run["twins_hit"], run["twins_miss"]) == (2, 0)
    assert run["sources"]["twin"]["draft_tokens"] == run["draft_tokens"]
    engine.check_integrity()
