"""Turns text into tokens with the tokenizer that `--tokenizer` names; token ids stay as they are.

Dumps of text lack what the framework removed: special tokens, and the model's own split into tokens. So tokens made
from text are close to the run's, not identical.
"""

from importlib import import_module
from typing import Any

import numpy as np

from histospec.replay.recordings.check import Record, shown
from histospec.replay.recordings.values import Tokens, Turn
from histospec.server.errors import ConfigError

NONE = (
    "is text; name the tokenizer of the run's model with --tokenizer NAME_OR_PATH, such as --tokenizer Qwen/Qwen2.5-7B"
)
KEPT = 4096  # prompts whose tokens are cached: each response of a group has the same prompt


class Text:
    """Tokenizes fields of records, and counts the texts.

    Args:
        tokenizer: a name on the Hugging Face hub or a folder; None: text is refused.
        refusal: the message in that case.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer does not exist.

    """

    def __init__(self, tokenizer: str | None = None, refusal: str = NONE) -> None:
        self.encoded = 0
        """The number of texts that were tokenized."""
        self.tokenizer = tokenizer
        self._refusal = refusal
        self._encoder = None if tokenizer is None else _load(tokenizer)
        self._prompts: dict[str, Tokens] = {}

    def prompt(self, record: Record, field: str) -> Tokens:
        """Returns a prompt given as token ids, text or chat messages. Raises RecordingError if it is none, or empty."""
        value = record.get(field)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = self._rendered(record, field, value)
        if isinstance(value, str):
            tokens = self._prompts.get(value)
            if tokens is None:
                if len(self._prompts) >= KEPT:
                    self._prompts.clear()
                tokens = self._prompts[value] = self._encode(record, field, value)
        else:
            tokens = np.array(record.tokens(field, value), np.int32)
        if not len(tokens):
            raise record.wrong(f"{field}: must not be empty; remove the record")
        return tokens

    def response(self, record: Record, field: str) -> tuple[Turn, ...]:
        """Returns what the model wrote, given as token ids, text, or one chat message; empty if it wrote nothing.

        Raises:
            RecordingError: the field has another type.

        """
        value = record.get(field)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = _said(record, field, value)
        if isinstance(value, str):
            tokens = self._encode(record, field, value)
        else:
            tokens = np.array(record.tokens(field, value), np.int32)
        return (Turn(tokens, True),) if len(tokens) else ()

    def _encode(self, record: Record, field: str, text: str) -> Tokens:
        if self._encoder is None:
            raise record.wrong(f"{field}: {self._refusal}")
        self.encoded += 1
        return np.array(self._encoder.encode(text, add_special_tokens=False), np.int32)

    def _rendered(self, record: Record, field: str, messages: list[Any]) -> str:
        """Returns chat messages as the text that the model receives."""
        if self._encoder is None:
            raise record.wrong(f"{field}: {self._refusal}")
        for i, message in enumerate(messages):
            if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
                raise record.wrong(f"{field}[{i}]: should be a message with role and content, is {shown(message)}")
        try:
            return str(self._encoder.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program by the tokenizer's author
            why = " ".join(str(error).split())[:200]
            raise record.wrong(
                f"{field}: the tokenizer's chat template cannot render these messages ({why}); record the prompt as "
                "the text or the token ids that the model received"
            ) from None


def _said(record: Record, field: str, messages: list[Any]) -> str:
    message = messages[0]
    content = message.get("content")
    if len(messages) == 1 and message.get("role") == "assistant" and isinstance(content, str):
        return content
    raise record.wrong(
        f"{field}: {len(messages)} messages are not one text of the role assistant; record a response of several turns "
        "as turns with token ids (docs/replay.md)"
    )


def _load(name: str) -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ConfigError(
            "--tokenizer: text needs the package transformers, which is not installed: pip install transformers"
        ) from None
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # from the hub, from files, or from code in them
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"--tokenizer: {shown(name)} cannot be loaded ({lines[0][:200]}); give the folder of a tokenizer, or "
            "a name that this machine can fetch from the Hugging Face hub"
        ) from None
