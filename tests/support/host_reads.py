"""Counts reads of tensors by the host. On a GPU each waits for the device; on a CPU neither tests nor times show it."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READS = frozenset(
    ["__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "cpu", "equal",
     "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist", "unique"]
)  # fmt: skip


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yields the names of the reads within the block, by whatever code it calls."""
    overrides: Any = importlib.import_module("torch.overrides")
    found: list[str] = []

    class Mode(overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in READS:
                found.append(name)
            return func(*args, **(kwargs or {}))

    with Mode():
        yield found
