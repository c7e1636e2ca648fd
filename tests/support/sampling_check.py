"""Samples many short responses with drafts, and compares their frequencies with the model's probabilities.

    python -m tests.support.sampling_check MODEL RESPONSES

prints the result as JSON. It runs in a process of its own, because a process repairs vLLM's CPU sampling once and for
all. It reads the adapter's environment.
"""

import itertools
import json
import math
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTH = 4
LIMIT = 5  # standard deviations; exact sampling exceeds it once in three million
PROMPT = [3, 1, 4, 1, 5]
ENGINE = {
    "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 256,
    "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False, "seed": 1,
    "speculative_config": {
        "method": "custom_class",
        "model": "histospec.client.vllm.HistoSpecProposer",
        "num_speculative_tokens": LENGTH,
    },
    "scheduler_cls": "histospec.client.vllm.HistoSpecScheduler",
}  # fmt: skip


def joint(model_path: str) -> NDArray[np.float64]:
    """Probability of every continuation of LENGTH tokens: float64 array of shape [V] * LENGTH."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    size = model.config.vocab_size
    probability = torch.ones([], dtype=torch.float64)
    with torch.inference_mode():
        for known in range(LENGTH):
            before = torch.tensor(list(itertools.product(range(size), repeat=known))).view(size**known, known)
            texts = torch.cat([torch.tensor(PROMPT).expand(len(before), -1), before.long()], 1)
            logits = torch.cat([model(input_ids=part).logits[:, -1] for part in texts.split(8192)])
            probability = probability.unsqueeze(-1) * logits.double().softmax(-1).view([size] * (known + 1))
    found: NDArray[np.float64] = probability.numpy()
    return found


def deviation(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Chi-square of counts against expected counts, rare cells merged, as a standard normal deviate."""
    rare = expected < 5
    observed = [*counts[~rare], counts[rare].sum()]
    wanted = [*expected[~rare], expected[rare].sum()]
    chi2 = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0)
    return wilson_hilferty(chi2, len(wanted) - 1)


def wilson_hilferty(chi2: float, freedom: int) -> float:
    """A chi-square statistic as a standard normal deviate: its cube root is nearly normal."""
    return float(((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def check(llm: Any, model_path: str, responses: int) -> dict[str, Any]:
    """Samples with an engine of `ENGINE`'s settings.

    Returns:
        dict: `drafted` and `accepted` tokens; `z`: for each pair of consecutive positions, how many standard deviations
        the chi-square statistic of their tokens lies above what exact sampling gives.
    """
    import numpy as np
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1, max_tokens=LENGTH, detokenize=False, n=500)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * (responses // 500), sampling, use_tqdm=False)
    tokens = np.array([list(c.token_ids) for output in outputs for c in output.outputs])
    probability = joint(model_path)
    z = []
    for first in range(LENGTH - 1):
        pair = probability.sum(tuple(a for a in range(LENGTH) if a not in (first, first + 1)))
        counts = np.zeros(pair.shape)
        np.add.at(counts, (tokens[:, first], tokens[:, first + 1]), 1)
        z.append(float(deviation(counts, pair * len(tokens))))
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    return {"z": z, "drafted": drafted, "accepted": accepted}


def main(model_path: str, responses: int) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    sys.stdout.write(json.dumps(check(LLM(model=model_path, **ENGINE), model_path, responses)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
