"""A dropped namespace is gone with its last session, even if the builder is building one of its segments."""

import numpy as np

from histospec.native import Engine

PROMPT = np.array([1, 2, 3], np.int32)
LONG = np.random.default_rng(1).integers(0, 50, 400_000, np.int32)  # the builder needs about 100 ms for it


def test_it_does_not_wait_for_a_segment_of_what_is_forgotten() -> None:
    engine = Engine(1 << 30)
    for _ in range(5):
        finished, running = engine.open("run", PROMPT), engine.open("run", PROMPT)
        engine.step(np.array([finished], np.int64), LONG, np.array([0, LONG.size], np.int64), 0)
        engine.close(finished)  # the builder begins
        assert engine.drop_namespace("run") == 1
        engine.close(running, commit=False)
        assert engine.stats()["namespaces"] == {}
        assert engine.running_bytes() == 0
    engine.wait_until_built()
    engine.check_integrity()
    assert engine.memory_bytes() == Engine(1 << 30).memory_bytes()
