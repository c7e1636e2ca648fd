"""What is replayed: a problem at one of its visits, with what the drafter may know and who runs beside it.

One response of a visit is the target: the first. Earlier visits are history. The other responses of the visit can be
known in one of two ways: finished before the target begins (`case_at` with siblings), which is more than a run would
know; or running at the same time, revealed token by token (`group_at`), which is what a run knows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from histospec.replay.recordings import Problem, RecordedResponse, Tokens, Turn

Turns = tuple[Turn, ...]


@dataclass(frozen=True)
class Case:
    """One problem as the drafter will meet it: what it may know, and the target it is asked about.

    Attributes:
        prompt: int32[n].
        history: responses that were finished before.
        target: the response that is written again and scored.
        siblings: responses that are written again at the same time.

    """

    prompt: Tokens
    history: tuple[RecordedResponse, ...]
    target: Turns
    siblings: tuple[Turns, ...] = ()

    def history_tokens(self) -> int:
        """Tokens that the drafter knows before the target begins, the prompt not counted."""
        return sum(len(turn.tokens) for response in self.history for turn in response.turns)

    def target_tokens(self) -> int:
        """Tokens of the target that the model generated."""
        return generated_tokens(self.target)


def generated_tokens(turns: Iterable[Turn]) -> int:
    """How many tokens of the turns the model wrote."""
    return sum(len(turn.tokens) for turn in turns if turn.generated)


def case_at(problem: Problem, epoch: int, *, siblings: bool, max_response: int) -> Case | None:
    """The problem at one of its visits, or None where there is nothing to know or nothing to ask about.

    Args:
        problem: the recorded problem.
        epoch: a visit of the problem; its first response becomes the target.
        siblings: whether the drafter also knows the visit's other responses, as if they had just been finished.
        max_response: the target is cut to this many tokens.

    """
    visit = [response for response in problem.responses if response.epoch == epoch]
    known = [response for response in problem.responses if response.epoch < epoch]
    if siblings:
        known += visit[1:]
    if not visit or not known:
        return None
    return Case(problem.prompt, tuple(known), visit[0].cut(max_response))


def group_at(problem: Problem, epoch: int, *, siblings: int | None, history: bool, max_response: int) -> Case:
    """The problem at one of its visits, with siblings that run at the same time as the target.

    Args:
        problem: the recorded problem.
        epoch: a visit of the problem; its first response becomes the target.
        siblings: how many other members of the target's group run beside it, or None for all; a smaller group gives
            all that it has.
        history: whether the drafter knows the responses of earlier visits.
        max_response: the target and its siblings are cut to this many tokens.

    """
    visit = [response for response in problem.responses if response.epoch == epoch]
    known = [response for response in problem.responses if history and response.epoch < epoch]
    target = visit[0]
    beside = [response for response in visit[1:] if response.group == target.group][:siblings]
    return Case(
        problem.prompt,
        tuple(known),
        target.cut(max_response),
        tuple(response.cut(max_response) for response in beside),
    )
