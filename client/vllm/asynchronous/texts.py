"""The texts of a worker's requests, as far as drafts need them, and how a draft fits a text that has grown since."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from histospec.client.engines.options import Bounds

if TYPE_CHECKING:
    from histospec.client import Draft


@dataclass(slots=True, eq=False)
class Text:
    """The generated tokens of one request, from when it began or was resumed to its end or preemption.

    Attributes:
        request: its id.
        length: how many tokens were generated.
        bounds: the lengths between which it may end.
        ended: whether the request has ended, or was preempted; a resumed request has another text.
        recent: the last of the tokens.
        draft: the server's newest draft; None until one has arrived.
        drafted_at: the length of the text that it continues.
        places: how many tokens of the draft asked for last the step can verify.
    """

    request: str
    length: int
    bounds: Bounds
    ended: bool = False
    recent: list[int] = field(default_factory=list)
    draft: "Draft | None" = None
    drafted_at: int = -1
    places: int = 0

    def grow(self, tokens: Sequence[int], kept: int) -> None:
        """Adds tokens; keeps at least the last `kept` ones."""
        self.length += len(tokens)
        self.recent += tokens
        if len(self.recent) > 2 * kept:
            del self.recent[:-kept]

    def since(self, end: int) -> Sequence[int] | None:
        """Returns the tokens after the first `end`; None if they are no longer known."""
        count = self.length - end
        if not 0 <= count <= len(self.recent):
            return None
        return self.recent[len(self.recent) - count :]

    def take(self, draft: "Draft", end: int) -> None:
        """Takes a draft for the first `end` tokens, unless one for a longer text has arrived."""
        if end >= self.drafted_at:
            self.draft, self.drafted_at = draft, end

    @property
    def room(self) -> int:
        """How many drafted tokens the present text can use."""
        return self.bounds.room(self.length)

    @property
    def fitting(self) -> "Draft | None":
        """What the newest draft has for the present text, if anything."""
        return None if self.draft is None else rest(self.draft, self.since(self.drafted_at))


def rest(draft: "Draft", since: Sequence[int] | None) -> "Draft | None":
    """Returns what is left of a draft for a text that has grown by `since`; None if nothing of it can be right."""
    if since is None or len(since) >= len(draft) or draft.tokens[: len(since)].tolist() != list(since):
        return None
    return type(draft)(draft.tokens[len(since) :], draft.probs[len(since) :])
