"""Engines in a child process, for tests that read its output.

    python told_engine.py MODEL

It reads commands from standard input, one JSON object per line, and answers each with a line of ANSWER and JSON:

- {"start": vLLM's arguments, "environment": {...}}: an engine as if it had just started, in place of the one before;
- {"end": true}: ends that engine;
- {"generate": prompts, ...}: rolls them out; further keys are those of SamplingParams;
- {"seconds": n}: a minute between two lines is so long from now on.

What fails is answered with {"error": "TYPE: MESSAGE"}. Everything else that it prints is vLLM's and HistoSpec's.
"""

import json
import os
import sys
from typing import Any

ANSWER = "@@answer@@ "

DEFAULTS = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False, "seed": 0,
}  # fmt: skip


class Process:
    """One engine at a time; those of the same arguments are started once."""

    def __init__(self, model: str) -> None:
        from tests.support.engines import Engines

        self._engines = Engines()
        self._model = model
        self._lent: tuple[Any, dict[str, Any]] | None = None

    def do(self, command: dict[str, Any]) -> Any:
        if "start" in command:
            return self._start(command["start"], command.get("environment", {}))
        if "end" in command:
            return self._end()
        if "seconds" in command:
            return self._shorten(command["seconds"])
        return self._generate(command.pop("generate"), command)

    def _start(self, arguments: dict[str, Any], environment: dict[str, str]) -> str:
        self._end()
        for name in [name for name in os.environ if name.startswith("HISTOSPEC_")]:
            del os.environ[name]
        os.environ.update(environment)
        arguments = DEFAULTS | {"model": self._model} | arguments
        self._lent = self._engines.borrow(**arguments), arguments
        return "started"

    def _end(self) -> str:
        if self._lent is not None:
            self._engines.give_back(self._lent[0], **self._lent[1])
            self._lent = None
        return "ended"

    def _shorten(self, seconds: float) -> str:
        from histospec.client.core import outage_log
        from histospec.client.engines import reporting

        outage_log.PAUSE = reporting.MINUTE = seconds
        return "shortened"

    def _generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        assert self._lent is not None
        if "logit_bias" in sampling:  # JSON has no other keys
            sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
        parameters = SamplingParams(**{"temperature": 0, "max_tokens": 40, "detokenize": False} | sampling)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._lent[0].generate(inputs, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def main(model: str) -> None:
    process = Process(model)
    for line in sys.stdin:
        try:
            answer = process.do(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"\n{ANSWER}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    main(sys.argv[1])
