"""A drafter for measurements: its drafts have a given length and are never right. vLLM imports it by its name."""

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
"""vLLM's arguments for this drafter."""
ROWS = 997  # how many drafts are made beforehand, outside of the measured time


class FixedLengthDrafter:
    """Drafts `length` random tokens for each request. Its engine has the settings that HistoSpec's drafter needs."""

    length = 0
    """Tokens per draft, at most LONGEST. A class attribute, which the measurement changes between two steps."""

    def __init__(self, vllm_config: Any) -> None:
        vocabulary, rng = vllm_config.model_config.get_vocab_size(), Random(0)
        self._rows = [[rng.randrange(vocabulary) for _ in range(LONGEST)] for _ in range(ROWS)]
        self._next = 0
        cpu.install()
        undrafted.install()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing; vLLM's CPU runner calls it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Returns one draft per request; an empty one while vLLM still reads its prompt."""
        self._next += len(sampled_token_ids)
        return [
            self._rows[(self._next + i) % ROWS][: self.length] if tokens else []
            for i, tokens in enumerate(sampled_token_ids)
        ]
