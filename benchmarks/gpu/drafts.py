"""A drafter whose drafts are as long as the measurement wants and never right; vLLM imports it by its name."""

from random import Random
from typing import Any

from histospec.client.vllm.patches import cpu, undrafted

LONGEST = 16
OPTIONS: dict[str, Any] = {
    "speculative_config": {
        "method": "custom_class",
        "model": f"{__name__}.FixedLengthDrafter",
        "num_speculative_tokens": LONGEST,
    }
}
"""vLLM's arguments for it."""
ROWS = 997  # drafts made beforehand: making them is no part of what is measured


class FixedLengthDrafter:
    """Drafts `length` random tokens for each request; otherwise the engine is set as HistoSpec's drafter sets it."""

    length = 0
    """Tokens a draft, at most LONGEST. Of the class: the measurement changes it between two steps."""

    def __init__(self, vllm_config: Any) -> None:
        vocabulary, rng = vllm_config.model_config.get_vocab_size(), Random(0)
        self._rows = [[rng.randrange(vocabulary) for _ in range(LONGEST)] for _ in range(ROWS)]
        self._next = 0
        cpu.install()
        undrafted.install()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load; the CPU runner calls it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """One draft a request; none while its prompt is still being read."""
        self._next += len(sampled_token_ids)
        return [
            self._rows[(self._next + i) % ROWS][: self.length] if tokens else []
            for i, tokens in enumerate(sampled_token_ids)
        ]
