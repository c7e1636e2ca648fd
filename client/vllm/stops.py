"""Where a response with stop strings ends.

vLLM finds stop strings only in its front end, which then aborts the request; the engine core has run on by then, and
cannot tell that abort from any other. So the end is found here with vLLM's own detokenizer, once, when the request
leaves. Stop tokens need none of this: the engine core cuts at them itself.
"""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

from .interface import Request

# The engine core runs a few steps ahead of the front end, each of at most a draft and one token; a stop string further
# back would have ended the request long ago. Decoding all of a long response here would hold up the engine.
WINDOW = 512
CONTEXT = 32  # tokens before the window that the decoder starts from


class StopStrings:
    """Finds the end of responses; loads the model's tokenizer when the first one asks."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._tokenizer: Any = None

    def end(self, request: Request) -> int | None:
        """Output tokens up to and including the one that completes a stop string; None when none does.

        Raises what vLLM's tokenizer and detokenizer raise.
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
