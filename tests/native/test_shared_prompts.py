"""Prompts that a namespace shares with others, as the server looks them up."""

import numpy as np
import pytest

from histospec.native import Engine


def ingest(engine: Engine, namespace: str, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        engine.ingest(namespace, np.array(prompt, np.int32), [np.array([7, 8], np.int32)])


def test_counts_by_namespace() -> None:
    engine = Engine(memory_bytes=1 << 28)
    prompts = [[1, i] for i in range(70)]
    ingest(engine, "train", prompts)
    ingest(engine, "trian", prompts[40:])
    ingest(engine, "another", [[2, 1]])
    assert engine.shared_prompts("trian") == (30, {"train": 30})
    assert engine.shared_prompts(namespace="train", most=32) == (32, {"trian": 30})
    assert engine.shared_prompts("train") == (64, {"trian": 30})
    assert engine.shared_prompts("another") == (1, {})
    assert engine.shared_prompts("absent") == (0, {})
    with pytest.raises(TypeError):
        engine.shared_prompts(b"train")  # type: ignore[arg-type]
