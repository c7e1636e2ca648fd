"""The cases of a replay: a problem at one of its visits, with the history and siblings that the drafter may know.

The first response of a visit is the target. Earlier visits are history. The drafter can know the other responses of the
visit in one of two ways. With `case_at` and siblings, they are finished before the target begins, which is more than a
run would know. With `group_at`, they run at the same time and appear token by token, as in a run.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from histospec.replay.recordings import Problem, RecordedResponse, Tokens, Turn

Turns = tuple[Turn, ...]


@dataclass(frozen=True)
class Case:
    """One problem for the drafter: what it may know, and the target to draft for.

    Attributes:
        prompt: int32[n].
        history: responses finished before.
        target: the response to replay and score.
        siblings: responses to replay at the same time.

    """

    prompt: Tokens
    history: tuple[RecordedResponse, ...]
    target: Turns
    siblings: tuple[Turns, ...] = ()

    def history_tokens(self) -> int:
        """The tokens that the drafter knows before the target begins, without the prompt."""
        return sum(len(turn.tokens) for response in self.history for turn in response.turns)

    def target_tokens(self) -> int:
        """The tokens of the target that the model generated."""
        return generated_tokens(self.target)


def generated_tokens(turns: Iterable[Turn]) -> int:
    """Returns the number of tokens of the turns that the model generated."""
    return sum(len(turn.tokens) for turn in turns if turn.generated)


def case_at(problem: Problem, epoch: int, *, siblings: bool, max_response: int) -> Case | None:
    """Returns the problem at one of its visits; None if there is no history or no target.

    Args:
        problem: the recorded problem.
        epoch: a visit of the problem; its first response becomes the target.
        siblings: whether the drafter also knows the visit's other responses, as if they were finished.
        max_response: maximum tokens of the target; the rest is cut.

    """
    visit = [response for response in problem.responses if response.epoch == epoch]
    known = [response for response in problem.responses if response.epoch < epoch]
    if siblings:
        known += visit[1:]
    if not visit or not known:
        return None
    return Case(problem.prompt, tuple(known), visit[0].cut(max_response))


def group_at(problem: Problem, epoch: int, *, siblings: int | None, history: bool, max_response: int) -> Case:
    """Returns the problem at one of its visits, with siblings that run at the same time as the target.

    Args:
        problem: the recorded problem.
        epoch: a visit of the problem; its first response becomes the target.
        siblings: how many other members of the target's group run at the same time, or None for all; a smaller group
            gives all it has.
        history: whether the drafter knows the responses of earlier visits.
        max_response: maximum tokens of the target and of each sibling; the rest is cut.

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
