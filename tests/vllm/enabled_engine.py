"""Starts vLLM as a program that knows nothing of HistoSpec; writes a file of JSON.

    python enabled_engine.py FILE ARGUMENTS(JSON) PROMPTS(JSON)

ARGUMENTS are vLLM's. Rolls the prompts out twice: `responses` holds a list of token ids for each prompt, of each visit;
`accepted`: drafted tokens that were; `settings`: what vLLM's configuration has.
"""

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 800  # below the limit of pytest, which would end this process without the stacks


def settings(config: Any) -> dict[str, Any]:
    speculative, scheduling = config.speculative_config, config.scheduler_config
    return {
        "method": speculative and speculative.method,
        "model": speculative and speculative.model,
        "tokens": speculative and speculative.num_speculative_tokens,
        "scheduler": scheduling.scheduler_cls,
        "asynchronous": scheduling.async_scheduling,
    }


class Lines(logging.Handler):
    """Keeps the lines of HistoSpec."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def configured(engines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What vLLM's configuration has for each engine (`settings` or `error`), and what HistoSpec logged (`lines`)."""
    from vllm.engine.arg_utils import EngineArgs

    found: list[dict[str, Any]] = []
    for arguments in engines:
        lines = Lines()
        logger = logging.getLogger("histospec.vllm")
        logger.setLevel(logging.INFO)
        logger.addHandler(lines)
        try:
            found.append({"settings": settings(EngineArgs(**arguments).create_engine_config())})
        except ValueError as error:
            found.append({"error": str(error)})
        logger.removeHandler(lines)
        found[-1]["lines"] = lines.kept
    return found


def generate(arguments: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    sampling = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    visits = []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        visits.append([[list(output.outputs[0].token_ids)] for output in outputs])
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens", 0)
    found = {"settings": settings(llm.llm_engine.vllm_config), "responses": visits, "accepted": accepted}
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    path, *given = sys.argv[1:]
    written = generate(*map(json.loads, given))
    Path(path).write_text(json.dumps(written))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may not end
