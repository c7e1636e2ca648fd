"""Measures how much longer the first step with a number of tokens takes than later ones, on a CPU.

    python -m benchmarks.vllm.first_steps    # needs vllm; half a minute

Each request is a prompt of another length and yields one token, so one step computes all of it. oneDNN compiles kernels
for each number of tokens when it first occurs.
"""

import statistics
import tempfile
import time
from pathlib import Path

import benchmarks.vllm.environment  # noqa: F401 - first

# isort: split
from vllm import SamplingParams

from benchmarks.tables import table
from examples.tiny_rl import policy
from examples.tiny_rl.rollout import RolloutEngine, as_prompt
from examples.tiny_rl.task import VOCABULARY

ROUNDS = 4
BANDS = (10, 40), (40, 80), (80, 137)


def main() -> None:
    """Prints the table."""
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    with tempfile.TemporaryDirectory() as name:
        policy.load().save_pretrained(name)
        engine = RolloutEngine(Path(name), 8, {"enable_prefix_caching": False})
        engine.llm.generate([as_prompt([0])], sampling, use_tqdm=False)
        seconds: dict[int, list[float]] = {tokens: [] for tokens in range(BANDS[0][0], BANDS[-1][1])}
        for _ in range(ROUNDS):
            for tokens, measured in seconds.items():
                prompt = as_prompt([i % len(VOCABULARY) for i in range(tokens)])
                start = time.process_time()
                engine.llm.generate([prompt], sampling, use_tqdm=False)
                measured.append(time.process_time() - start)
    rows = []
    for low, high in BANDS:
        first = statistics.median(seconds[n][0] for n in range(low, high))
        later = statistics.median(each for n in range(low, high) for each in seconds[n][1:])
        rows.append([f"{low} to {high - 1}", f"{1e3 * first:.1f}", f"{1e3 * later:.1f}", f"{first / later:.1f}"])
    print(table(["tokens of a step", "first, ms of CPU time", "later", "ratio"], rows), end="")


if __name__ == "__main__":
    main()
