"""Passes the version of the weights to the scheduler. vLLM passes it to its engine core only."""

import functools
import importlib
from typing import Any

from histospec.client.vllm.patches.replacing import is_replaced, replace

NAME = "set_weight_version"


def install() -> None:
    """Makes engine cores call the scheduler's method `_hear_weight_version`, if it has one; at most once per process.

    vLLM before 0.27 has no weight versions; nothing is replaced there.
    """
    core: Any = importlib.import_module("vllm.v1.engine.core").EngineCore
    set_version = getattr(core, NAME, None)
    if set_version is None or is_replaced(core, NAME):
        return

    @functools.wraps(set_version)
    def set_and_tell(self: Any, weight_version: str, *args: Any, **kwargs: Any) -> Any:
        done = set_version(self, weight_version, *args, **kwargs)
        hear = getattr(self.scheduler, "_hear_weight_version", None)
        if hear is not None:
            hear(weight_version)
        return done

    replace(core, NAME, set_and_tell)
