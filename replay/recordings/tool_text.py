"""Finds what tools and users wrote within the text of a response, by the marks around it.

Dumps of multi-turn rollouts hold an episode as one text. Marks of three kinds enclose what the model did not write:
those of the tokenizer's chat template, with and without its special tokens; tags that agent frameworks use; and those
that the user names.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

TAGS = ("tool_response", "information", "interpreter", "observation")
"""Around the answers of tools: Qwen's and Hermes' templates, Search-R1, ReTool, ReAct."""
_ASKED, _ANSWERED, _TOLD = "What is asked", "What is answered", "What is told"


class Marks(NamedTuple):
    """What stands before and after a text that the model did not write."""

    begin: str
    end: str


Part = tuple[str, bool]
"""A text, and whether the model wrote it."""


class ToolText:
    """Splits responses at marks. Counts what it found.

    Args:
        marks: of the run, as the user names them.
        known: whether to look for the known tags, too.

    """

    def __init__(self, marks: Sequence[Marks] = (), known: bool = True) -> None:
        tags = [
            pattern
            for tag in TAGS
            for pattern in (  # a response may end within an answer; a tag alone may be a word of the model
                rf"\n(?:user|tool)\n(?:<{tag}>.*?(?:</{tag}>\s*|\Z))+(?:assistant\n)?",
                rf"(?:<{tag}>.*?</{tag}>\s*)+(?:assistant\n)?",
            )
        ]
        exact = [rf"{re.escape(one.begin)}.*?(?:{re.escape(one.end)}|\Z)" for one in marks]
        self._patterns = exact + (tags if known else [])
        self.known = known
        self._found = self._pattern()
        self.cut = self.uncut = 0
        """Numbers of responses with and without such parts."""
        self.letters = 0
        """Length of these parts."""

    def learn(self, tokenizer: Any) -> None:
        """Adds the marks of a tokenizer's chat template, if it has one."""
        if self.known:
            pairs = [rf"{re.escape(one.begin)}.*?{re.escape(one.end)}" for one in _of_template(tokenizer)]
            self._patterns += pairs
            self._found = self._pattern()

    def _pattern(self) -> "re.Pattern[str] | None":
        return re.compile("|".join(self._patterns), re.DOTALL) if self._patterns else None

    def parts(self, text: str) -> list[Part]:
        """Returns the parts of a response in order; none is empty."""
        parts = [(part, generated) for part, generated in self._split(text) if part]
        others = sum(len(part) for part, generated in parts if not generated)
        self.cut += bool(others)
        self.uncut += not others
        self.letters += others
        return parts

    def _split(self, text: str) -> Iterator[Part]:
        at = 0
        for found in self._found.finditer(text) if self._found else ():
            yield text[at : found.start()], True
            yield found[0], False
            at = found.end()
        yield text[at:], True


def _of_template(tokenizer: Any) -> set[Marks]:
    """Returns the marks around a tool's and a user's turn between two turns of the model.

    Dumps are decoded with or without special tokens, so each pair of marks comes in both forms.
    """

    def plain(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True))

    marks = set()
    for role in ("tool", "user"):
        turns = (("user", _ASKED), ("assistant", _ANSWERED), (role, _TOLD))
        messages = [{"role": writer, "content": text} for writer, text in turns]
        for form in (str, plain):
            try:
                text = form(str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))
            except Exception:  # a template is a program by the tokenizer's author, and may refuse the role
                continue
            begin, told, end = text.partition(_ANSWERED)[2].partition(_TOLD)
            if told and begin.strip() and end.strip():
                marks.add(Marks(begin, end))
    return marks
