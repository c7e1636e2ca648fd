"""Sampling options that vLLM supports with speculation: greedy output is the same with and without drafts.

docs/troubleshooting.md has the table. What vLLM refuses is in test_lines.py.
"""

from typing import Any

import pytest

from tests.support.engines import Prompts, StartEngine
from tests.support.servers import Server
from tests.support.tiny_policy import ALPHABET
from tests.vllm.conftest import ASYNCHRONOUS

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": list(range(0, 32, 2))},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 20))},
    "bad_words": {"bad_words": []},  # of what the engine writes
    "logprobs": {"logprobs": 3},
    "structured_outputs": {"structured_outputs": "[a-h0-3]{40}"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_output_is_that_without_drafts(engine: StartEngine, shared_server: Server, prompts: Prompts, name: str) -> None:
    """The second visit drafts from the first; its drafts are accepted, and wrong ones are not."""
    from vllm.sampling_params import StructuredOutputsParams

    sampling: dict[str, Any] = dict(OPTIONS[name])
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = StructuredOutputsParams(regex=sampling["structured_outputs"])
    plain = engine(skip_tokenizer_init=False)
    free = plain.generate(prompts)
    if "bad_words" in sampling:
        sampling["bad_words"] = ["".join(ALPHABET[t] for t in free[i][0][5 : 6 + i]) for i in range(3)]
    expected = plain.generate(prompts, **sampling)
    assert name == "logprobs" or expected != free  # the option does something
    drafting = engine(shared_server.endpoint, skip_tokenizer_init=False)
    drafting.generate(prompts)  # a history that the option forbids in part
    assert drafting.generate(prompts, **sampling) == expected
    before = drafting.counter("spec_decode_num_accepted_tokens")
    assert drafting.generate(prompts, **sampling) == expected
    accepted = drafting.counter("spec_decode_num_accepted_tokens") - before
    without = ASYNCHRONOUS and name == "structured_outputs"  # vLLM checks a grammar before the drafts arrive
    assert accepted == 0 if without else accepted > 0
