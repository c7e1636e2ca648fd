"""What the scheduler and the speculator tell each other: attributes of vLLM's own messages, which vLLM pickles whole.

scheduler ── Order, with each SchedulerOutput ──► speculator (worker) ── Outcome, with each output ──► scheduler
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from histospec.client.engines.options import Bounds, RequestOptions
from histospec.client.vllm.patches.replacing import attach

ORDER = "_histospec_order"
OUTCOME = "_histospec_outcome"


class Beginning(NamedTuple):
    """What the speculator must know of a request that begins or resumes: its options, and its bounds."""

    options: RequestOptions
    bounds: Bounds


class Order(NamedTuple):
    """What a step asks of the speculator.

    Attributes:
        step: its number.
        verify_cost: the cost to ask for drafts with; None: ask for none.
        drafts: whether the step may verify drafts. If not, those asked for only show what drafts would yield.
        value: the cost of a drafted token, as the server's metrics show it while none is asked for.
        begun: the requests that begin or resume in it and have a session.
    """

    step: int
    verify_cost: float | None
    drafts: bool
    value: float
    begun: Mapping[str, Beginning]


class Answers(NamedTuple):
    """The server's drafts for a step, also those that were late.

    Attributes:
        number: counts the answers of the worker, from 1; the scheduler may get one twice.
        step: the number of the step for which they were asked.
        lengths: tokens of each draft.
        probs: float32[sum(lengths)]: the probability that a token is accepted if all before it are.
        waited: seconds that the step waited for them.
    """

    number: int
    step: int
    lengths: list[int]
    probs: NDArray[np.float32]
    waited: float


class Outcome(NamedTuple):
    """What the worker did in a step.

    Attributes:
        verified: how many drafted tokens it verified, of each request that had any.
        answers: those that have arrived. The list may grow until vLLM passes the output of the step on.
    """

    verified: Mapping[str, int]
    answers: list[Answers]


NOTHING = Outcome({}, [])


def put_order(scheduler_output: Any, order: Order) -> None:
    """Attaches an order to a SchedulerOutput."""
    attach(scheduler_output, ORDER, order)


def order_of(scheduler_output: Any) -> Order | None:
    """Returns the order in a SchedulerOutput; None if the scheduler could not give one."""
    order: Order | None = getattr(scheduler_output, ORDER, None)
    return order


def put_outcome(output: Any, outcome: Outcome) -> None:
    """Attaches an outcome to a ModelRunnerOutput."""
    attach(output, OUTCOME, outcome)


def outcome_of(output: Any) -> Outcome:
    """Returns the outcome in a ModelRunnerOutput; NOTHING if the worker could not give one."""
    outcome: Outcome = getattr(output, OUTCOME, NOTHING)
    return outcome
