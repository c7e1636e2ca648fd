"""An SGLang engine for tests, driven by lines of JSON: `python -m tests.sglang.engine_process ARGUMENTS`.

Each line of standard input is a command, each line of `ANSWERS` its answer. Generations run until `wait` asks for them.
"""

import asyncio
import importlib
import json
import os
import sys
from typing import Any


async def _generate(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(engine.async_generate(**request) for request in requests)))


async def serve(engine: Any, answers: Any) -> None:
    """Runs commands until standard input ends."""
    io_struct: Any = importlib.import_module("sglang.srt.managers.io_struct")

    manager, loop, running = engine.tokenizer_manager, asyncio.get_running_loop(), None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer: Any = None
        match command.pop("do"):
            case "start":
                running = asyncio.create_task(_generate(engine, command["requests"]))
            case "wait":
                assert running is not None
                answer = await running
            case "abort":
                manager.abort_request(**command)
            case "update":
                answer = await manager.update_weights_from_disk(io_struct.UpdateWeightFromDiskReqInput(**command))
            case "pause":
                await manager.pause_generation(io_struct.PauseGenerationReqInput(**command))
            case "continue":
                await manager.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Starts the engine, says so by an empty answer, and serves."""
    answers = os.fdopen(os.dup(1), "w")  # SGLang prints
    os.dup2(2, 1)
    sglang: Any = importlib.import_module("sglang")

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    answers.write("null\n")
    answers.flush()
    engine.loop.run_until_complete(serve(engine, answers))
    engine.shutdown()


if __name__ == "__main__":  # SGLang spawns processes, which import this module
    main()
