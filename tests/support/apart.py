"""Calls functions in processes of their own, which are forked from one that has imported vLLM.

Importing vLLM takes ten seconds of CPU time. A fork has no plug-in of vLLM's yet, and has not read any variable.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")

PARENT = multiprocessing.get_context("forkserver")
PARENT.set_forkserver_preload(["vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"])


def call(
    variables: dict[str, str], function: Callable[Args, Result], *args: Args.args, **options: Args.kwargs
) -> Result:
    """Returns or raises what the function does in a new process with the environment of this one and `variables`."""
    with ProcessPoolExecutor(1, PARENT, _set, (os.environ | variables,)) as process:
        result: Result = process.submit(function, *args, **options).result()
    return result


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)
