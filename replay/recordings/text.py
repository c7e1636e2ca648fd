"""Turns text into tokens with the tokenizer that `--tokenizer` names; token ids stay as they are.

Dumps of text lack what the framework removed: special tokens, and the model's own split into tokens. So tokens made
from text are close to the run's, not identical.
"""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from histospec.replay.recordings.check import Record, shown, whole
from histospec.replay.recordings.tool_text import Part, ToolText
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
        trusted: whether code that comes with the tokenizer may run.
        tools: splits responses into what the model wrote and what tools answered.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer does not exist or needs code that may not run.

    """

    def __init__(
        self,
        tokenizer: str | None = None,
        refusal: str = NONE,
        *,
        trusted: bool = False,
        tools: ToolText | None = None,
    ) -> None:
        self.encoded = self.mended = 0
        """Numbers of texts that were tokenized, and of those with half a surrogate pair, read as U+FFFD."""
        self.reasoned = 0
        """Number of messages whose reasoning has a field of its own."""
        self.tokenizer = tokenizer
        self.tools = tools or ToolText()
        self._refusal = refusal
        self._encoder = None if tokenizer is None else _load(tokenizer, trusted)
        if self._encoder is not None:
            self.tools.learn(self._encoder)
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
            tokens = _ids(record, field, value)
        if not len(tokens):
            raise record.wrong(f"{field}: must not be empty; remove the record")
        return tokens

    def response(self, record: Record, field: str) -> tuple[Turn, ...]:
        """Returns the turns of a response given as token ids, text or chat messages; none if the response is empty.

        Raises:
            RecordingError: the field has another type.

        """
        value = record.get(field)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            parts = list(self._said(record, field, value))
        elif isinstance(value, str):
            parts = self.tools.parts(value)
        else:
            tokens = _ids(record, field, value)
            return (Turn(tokens, True),) if len(tokens) else ()
        turns = (Turn(self._encode(record, field, text), generated) for text, generated in parts)
        return tuple(turn for turn in turns if len(turn.tokens))

    def _encode(self, record: Record, field: str, text: str) -> Tokens:
        if self._encoder is None:
            raise record.wrong(f"{field}: {self._refusal}")
        self.encoded += 1
        try:
            text.encode()
        except UnicodeEncodeError:
            self.mended += 1
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return np.array(self._encoder.encode(text, add_special_tokens=False), np.int32)

    def _said(self, record: Record, field: str, messages: list[Any]) -> Iterator[Part]:
        """Yields the texts of chat messages; those of the role assistant are the model's. Raises RecordingError."""
        for i, message in enumerate(messages):
            if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
                raise record.wrong(f"{field}[{i}]: should be a message with role and content, is {shown(message)}")
            place, generated = f"{field}[{i}]", message["role"] == "assistant"
            reasoning = _reasoning(record, place, message) if generated else ""
            self.reasoned += bool(reasoning)
            content = _joined(reasoning, _content(record, place, message, "content"))
            yield content + _calls(record, place, message), generated

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


def _ids(record: Record, field: str, value: Any) -> Tokens:
    """Returns a value as token ids. Raises RecordingError, also if it holds several texts."""
    if isinstance(value, list) and value:
        kind = "texts" if isinstance(whole(value[0]), str) else "lists" if isinstance(value[0], list) else None
        if kind is not None:
            raise record.wrong(
                f"{field}: is a list of {len(value)} {kind}; write one record for each: "
                f"jq -c '.{field}[] as $one | .{field} = $one' FILE"
            )
    return np.array(record.tokens(field, value), np.int32)


def _content(record: Record, place: str, message: Mapping[str, Any], key: str) -> str:
    """Returns a text of a message, also one of several parts, such as text and images. Raises RecordingError."""
    content = message.get(key) or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise record.wrong(f"{place}.{key}: should be text, is {shown(content)}")
    return content


def _reasoning(record: Record, place: str, message: Mapping[str, Any]) -> str:
    """Returns the reasoning that a server took out of the content, under the old name, the new one or both."""
    return _joined(*dict.fromkeys(_content(record, place, message, key) for key in ("reasoning_content", "reasoning")))


def _joined(*texts: str) -> str:
    """Returns the texts that are not empty, with an empty line between."""
    return "\n\n".join(filter(None, texts))


def _calls(record: Record, place: str, message: Mapping[str, Any]) -> str:
    """Returns the model's calls of tools as the templates of Qwen and Hermes write them. Raises RecordingError."""
    calls = _parsed(message.get("tool_calls") or []) or []
    if not isinstance(calls, list):
        raise record.wrong(f"{place}.tool_calls: should be a list of calls, is {shown(calls)}")
    return "".join(_call(record, f"{place}.tool_calls[{i}]", _parsed(call)) for i, call in enumerate(calls))


def _call(record: Record, place: str, call: Any) -> str:
    if not isinstance(call, dict):
        raise record.wrong(f"{place}: should be a call with its function, is {shown(call)}")
    return f"\n<tool_call>\n{json.dumps(call.get('function', call), ensure_ascii=False, default=str)}\n</tool_call>"


def _parsed(value: Any) -> Any:
    """Returns the value of a JSON text; other values, and text that is no JSON, as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _load(name: str, trusted: bool) -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ConfigError(
            "--tokenizer: text needs the package transformers, which is not installed: pip install transformers"
        ) from None
    try:
        # Without an explicit value, transformers asks on the standard input whether it may run the code.
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trusted)
    except Exception as error:  # from the hub, from files, or from code in them
        if not trusted and "trust_remote_code" in str(error):
            raise ConfigError(
                f"--tokenizer: {shown(name)} needs code of its own; read that code, and let it run with "
                "--trust-remote-code"
            ) from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"--tokenizer: {shown(name)} cannot be loaded ({lines[0][:200]}); give the folder of a tokenizer, or "
            "a name that this machine can fetch from the Hugging Face hub"
        ) from None
