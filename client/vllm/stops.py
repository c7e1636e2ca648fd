"""Finds the end of a response with stop strings.

vLLM finds stop strings in its front end, which then aborts the request. Meanwhile the engine core has generated more
tokens, and it cannot tell this abort from others. So this module finds the end, with vLLM's own detokenizer, once, when
the request ends. Stop tokens do not need this, because the engine core stops at them itself.
"""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

from histospec.client.vllm.interface import Request

# The engine core is a few steps ahead of the front end, each of at most a draft and one token. A stop string further
# back would have ended the request earlier. Decoding a long response as a whole would delay the engine.
WINDOW = 512
CONTEXT = 32  # how many tokens before the window the decoder gets


class StopStrings:
    """Finds the ends of responses. Loads the model's tokenizer at the first one."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._tokenizer: Any = None

    def end(self, request: Request) -> int | None:
        """Returns the number of output tokens up to the one that completes a stop string; None if none does.

        It raises the errors of vLLM's tokenizer and detokenizer.
        """
        parameters, output = request.sampling_params, request.output_token_ids
        if parameters is None or not parameters.stop:
            return None
        start = max(0, len(output) - WINDOW)
        before = [*(request.prompt_token_ids or ())[-CONTEXT:], *output[max(0, start - CONTEXT) : start]]
        detokenizer = self._detokenizer(request, before[-CONTEXT:], max(0, parameters.min_tokens - start))
        for position, token in enumerate(output[start:], start + 1):
            if detokenizer.update([token], False):
                return position
        return None

    def _detokenizer(self, request: Request, before: list[int], min_tokens: int) -> Any:
        if self._tokenizer is None:
            tokenizers = importlib.import_module("vllm.tokenizers")
            self._tokenizer = tokenizers.cached_tokenizer_from_config(self._model_config)
        parameters: Any = copy.copy(request.sampling_params)
        parameters.min_tokens = min_tokens
        window: Any = SimpleNamespace(
            request_id=request.request_id, prompt_token_ids=before, prompt_embeds=None, sampling_params=parameters
        )
        detokenizer = importlib.import_module("vllm.v1.engine.detokenizer")
        return detokenizer.IncrementalDetokenizer.from_new_request(self._tokenizer, window)
