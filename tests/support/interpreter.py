"""Repairs Triton's interpreter for two kernels of vLLM on which it fails."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any


def repair() -> None:
    """Changes two functions of Triton 3.9's interpreter, at most once per process.

    - A counter of `tl.range` is a tensor where its start is one, as on a GPU, and no integer of Python's: vLLM's kernel
      for top-k and top-p calls its method `to`.
    - A truth value that is spread over a block stays one, and becomes no integer: vLLM's kernel for grammars stores
      with such a mask.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter._patch_lang_core, "__wrapped__"):
        return
    interpreter._patch_lang_core = _with_tensors_as_counters(interpreter._patch_lang_core)
    builder = interpreter.InterpreterBuilder
    builder.create_splat = _of_the_same_type(builder.create_splat)


def _with_tensors_as_counters(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def prepared(language: Any, scope: Any) -> None:
        prepare(language, scope)
        count = language.range

        def counters(start: Any, *args: Any, **named: Any) -> Iterator[Any]:
            first = int(start.handle.data[0]) if hasattr(start, "handle") else start
            for number in count(start, *args, **named):
                yield number if first is start else start + (number - first)

        scope.set_attr(language, "range", counters)

    return prepared


def _of_the_same_type(create_splat: Any) -> Any:
    @functools.wraps(create_splat)
    def splat(self: Any, block: Any, value: Any) -> Any:
        spread = create_splat(self, block, value)
        spread.data = spread.data.astype(value.data.dtype)
        return spread

    return splat
