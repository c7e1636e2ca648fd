"""What the scheduler and the speculator tell each other: attributes of vLLM's own messages, which vLLM pickles whole.

scheduler ── Order, with each SchedulerOutput ──► speculator (worker) ── [Answers], with each output ──► scheduler
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.engines.options import RequestOptions
from histospec.client.vllm.patches.replacing import attach

ORDER = "_histospec_order"
ANSWERS = "_histospec_answers"


class Order(NamedTuple):
    """What a step asks of the speculator.

    Attributes:
        step: its number.
        verify_cost: the cost to ask for drafts with; None: ask for none.
        drafts: whether the step may verify drafts. If not, those asked for only show what drafts would yield.
        looks: whether to ask for the newest texts even if no place is reserved.
        begun: the options of the requests that begin or resume in it and have a session.
    """

    step: int
    verify_cost: float | None
    drafts: bool
    looks: bool
    begun: Mapping[str, RequestOptions]


class Answers(NamedTuple):
    """The server's drafts for a step, also those that were late.

    Attributes:
        number: counts the answers of the worker, from 1; the scheduler may get one twice.
        step: the number of the step for which they were asked.
        requests: B ids.
        ends: for each request, the length of the text that its draft continues, in generated tokens.
        lengths: tokens of each draft.
        probs: float32[sum(lengths)]: the probability that a token is accepted if all before it are.
        waited: seconds that the step waited for them.
    """

    number: int
    step: int
    requests: list[str]
    ends: list[int]
    lengths: list[int]
    probs: NDArray[np.float32]
    waited: float


def put_order(scheduler_output: Any, order: Order) -> None:
    """Attaches an order to a SchedulerOutput."""
    attach(scheduler_output, ORDER, order)


def order_of(scheduler_output: Any) -> Order | None:
    """Returns the order in a SchedulerOutput; None if the scheduler could not give one."""
    order: Order | None = getattr(scheduler_output, ORDER, None)
    return order


def put_answers(output: Any, answers: list[Answers]) -> None:
    """Attaches a list of answers to a ModelRunnerOutput. It may grow until vLLM passes the output on."""
    attach(output, ANSWERS, answers)


def answers_of(output: Any) -> list[Answers]:
    """Returns the answers in a ModelRunnerOutput."""
    answers: list[Answers] = getattr(output, ANSWERS, [])
    return answers
