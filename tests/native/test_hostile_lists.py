"""Lists whose elements run code while the engine reads them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from histospec.native import Engine


class Element:
    """An integer 7 that calls a function in its __index__."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __index__(self) -> int:
        self.action()
        return 7


@pytest.mark.parametrize("change", [list.clear, lambda prompt: prompt.extend([1] * 100_000)], ids=["shrink", "grow"])
def test_a_list_that_changes_while_it_is_read(change: Callable[[list[Any]], Any]) -> None:
    engine = Engine(memory_bytes=1 << 28)
    prompt: list[Any] = [1, 2, 3]
    prompt.insert(1, Element(lambda: change(prompt)))
    engine.ingest("run", prompt, [[5, 6]])
    assert len(engine.history("run", [1, 7, 2, 3])) == 1


def test_an_element_that_raises_is_heard() -> None:
    engine = Engine(memory_bytes=1 << 28)
    with pytest.raises(ZeroDivisionError):
        engine.open("run", [1, Element(lambda: 1 // 0)])  # type: ignore[list-item]
    assert engine.stats()["sessions"] == 0


def test_a_name_is_text() -> None:
    """Bytes that are not UTF-8 as a name would make stats() fail for all callers."""
    engine = Engine(memory_bytes=1 << 28)
    with pytest.raises(TypeError):
        engine.open(b"\xff", [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.ingest(b"\xff", [1], [np.array([1], np.int32)])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.shared_prompts(b"train")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        engine.open("\ud800", [1])
    assert engine.stats()["namespaces"] == {}
