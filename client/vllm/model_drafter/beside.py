"""Runs the choice in an engine's steps: asks the model's drafter for tokens, picks drafts, learns from the results.

The drafter of a step runs after its forward pass, so vLLM verifies its tokens in the next step.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from histospec.protocol.costs import STARTING_SPEED_UP

from ..cost import DrafterCost
from ..patches import drafter
from .amount import REST, Amount
from .choice import Choice, Row
from .outcomes import levels

if TYPE_CHECKING:
    from ... import Draft
    from ..interface import ModelRunnerOutput, SchedulerOutput

VARIABLE = frozenset(("draft_model", "eagle", "eagle3", "mtp"))
"""Methods whose drafters make as many tokens as a step says. Others make `num_speculative_tokens` or fewer."""

LONGER = 0.4
"""Share of the cost with which to ask the server for drafts. Tokens that the model drafts, too, are more likely than
the server knows, so longer drafts pay. The comparison of both drafts cuts tokens that do not pay."""

STUDIED = 8  # learn from one in 8 of the steps in which only the model drafts,
FIRST_STUDIED = 64  # and from each of the first 64

LATELY = 0.98  # weight of the older steps in the speed-up, which is that of about fifty steps


class Verified(NamedTuple):
    """What a step verified of a request's drafts.

    Attributes:
        request: the id of the request.
        history: how many tokens of the server's draft, from its first on.
        drafted: how many tokens of the model's draft beyond those that the server drafted, too.
        accepted: how many of the latter were accepted.
    """

    request: str
    history: int
    drafted: int
    accepted: int


class ModelDrafter:
    """Combines the drafts of the model's own drafter with those of the server. Not thread-safe."""

    def __init__(self, longest: int, amount: Amount) -> None:
        """Takes the length of the longest draft, and the object that decides how many tokens the drafter makes."""
        self._longest = longest
        self._amount = amount
        self._choice = Choice(longest)
        self._asked = longest  # tokens of the next drafts
        self._rows: dict[str, Row] = {}  # the drafts that vLLM is verifying
        self._yield = STARTING_SPEED_UP
        self._alone = 0  # steps in which only the model drafted
        self._depth: int | None = None  # how many of its tokens to verify then; None: to be computed
        self._zeroed: Sequence[str] = ()  # requests for which vLLM drafted zeros in the newest step
        self._cost: DrafterCost | None = None

    @property
    def asked(self) -> int | None:
        """How many tokens the drafter made in the step that ends; None: it rested."""
        return None if self._asked == REST else self._asked

    @property
    def asks_at(self) -> float:
        """The share of the cost with which to ask the server for the next drafts to compare."""
        return LONGER if self._asked > 0 else 1.0

    def ask(self, step: "SchedulerOutput", cost: DrafterCost | None, server: bool = True, pause: bool = False) -> None:
        """Sets how many tokens the drafter makes in a step that was scheduled.

        Args:
            step: vLLM's step, which goes to its workers.
            cost: the cost of the drafter; None: not known yet.
            server: the server is also asked for drafts in these steps.
            pause: leave the drafter out of this step if possible.
        """
        if not step.num_scheduled_tokens:
            return
        verified = step.scheduled_spec_decode_tokens
        prompts = {r: n - len(verified.get(r, ())) > 1 for r, n in step.num_scheduled_tokens.items()}
        self._cost = cost
        self._asked = self._amount.next(cost, self._yield, any(prompts.values()), server, pause)
        if self._amount.told:
            step.num_spec_tokens_to_schedule = self._asked
        for new in step.scheduled_new_reqs:
            if new.num_computed_tokens:
                self._amount.cached(new.req_id)
        if self._zeroed:  # those that have not left since
            self._amount.left_out({request: False for request in self._zeroed if request in prompts})
            self._zeroed = ()
        if self._asked == REST:
            self._amount.left_out(prompts)

    def choose(
        self,
        requests: Sequence[str],
        history: Sequence["Draft | None"],
        model: Sequence[Sequence[int]],
        cost: float,
        asked: bool,
    ) -> list[list[int]]:
        """Returns the draft to verify for each request.

        Args:
            requests: the ids of the requests.
            history: the server's drafts; None or empty if there is none.
            model: the drafts of the model's drafter; longer ones than were asked for do not count.
            cost: the cost of verifying a token, in units of a step without drafts.
            asked: whether the server was asked for drafts; if not, their absence teaches nothing.
        """
        if all(len(row) == self._longest and not any(row) for row in model):
            # Near the end of the longest context vLLM drafts zeros for every request, without the drafter. A single
            # row of zeros is a real draft: for example the token of id 0, if drafts have one token.
            self._zeroed = requests
            model = [()] * len(requests)
        drafts = [self._made(row, request) for row, request in zip(model, requests, strict=True)]
        if not any(drafts):
            self._rows = {}
            if asked:
                firsts = [draft.probs[0] if draft is not None and len(draft) else 0.0 for draft in history]
                self._amount.saw_levels(levels(np.array(firsts, np.float32)))
            return [[] if draft is None else draft.tokens.tolist() for draft in history]
        self._alone += not asked
        if not asked and self._alone > FIRST_STUDIED and self._alone % STUDIED:
            if self._depth is None:
                self._depth = self._choice.outcomes.depth(cost * self._yield)
            depth = self._depth
            self._rows = {r: Row(list(draft[:depth]), 0, True) for r, draft in zip(requests, drafts, strict=True)}
            return [row.tokens for row in self._rows.values()]
        self._depth = None
        chosen, gains = self._choice.choose(requests, history, drafts, cost * self._yield)
        if asked:
            self._amount.saw_levels(gains.level)
        self._amount.saw(gains, np.array([self._amount.whole(request) for request in requests]))
        self._rows = dict(zip(requests, chosen, strict=True))
        return [row.tokens for row in chosen]

    def learn(self, step: "SchedulerOutput", output: "ModelRunnerOutput", cost: float) -> Iterator[Verified]:
        """Learns from the step that ends. Yields what it has verified.

        `cost` is that of verifying a token, in units of a step without drafts.
        """
        rows, self._rows = self._rows, {}
        self._choice.learn(output.req_ids, output.sampled_token_ids, rows)
        tokens = steps = drafted = 0
        for request, came in zip(output.req_ids, output.sampled_token_ids, strict=False):
            verified = len(step.scheduled_spec_decode_tokens.get(request, ()))
            if came:
                tokens, steps, drafted = tokens + len(came), steps + 1, drafted + verified
            if not rows:
                continue  # all drafts were the server's, which needs no report of it
            row = rows.get(request)
            shared = verified if row is None or not row.by_model else min(row.shared, verified)
            accepted = max(0, min(len(came) - 1, verified) - shared)
            yield Verified(request, shared, verified - shared, accepted)
        if steps:
            price = steps + cost * drafted
            if self._cost is not None and self._asked != REST:
                price += steps * (self._cost.first_pass + self._cost.token * self._asked)
            self._yield += (1 - LATELY) * (max(1.0, tokens / price) - self._yield)

    def forget(self, request: str) -> None:
        """Removes a request that has left."""
        self._choice.forget(request)
        self._amount.forget(request)

    def emptied(self) -> None:
        """Notes that vLLM's cache of prompts is empty."""
        self._amount.emptied()

    def _made(self, row: Sequence[int], request: str) -> Sequence[int]:
        """Returns the draft of the model; an empty one if it is poor or not a draft."""
        usable = len(row) <= self._asked and min(row, default=0) >= 0 and self._amount.whole(request)
        return row[: self._amount.most] if usable else ()


def model_drafter(vllm_config: Any, tokens: int | None) -> ModelDrafter | None:
    """Returns the ModelDrafter for the engine of a VllmConfig; None if only the server drafts.

    If data-parallel ranks share a model's layers, all of them have to make the same passes, so nothing varies.
    `tokens`: see `fixed` of Amount.
    """
    speculative = vllm_config.speculative_config
    if speculative.method == "custom_class":
        return None
    longest = speculative.num_speculative_tokens
    if tokens is not None:
        tokens = min(tokens, longest)  # vLLM has room for no more
    alone = vllm_config.parallel_config.data_parallel_size == 1
    told = drafter.can_be_told()
    vary = told and alone and speculative.method in VARIABLE and not getattr(speculative, "parallel_drafting", False)
    rest = told and alone and speculative.method not in ("ngram", "suffix")  # which cost next to nothing
    return ModelDrafter(longest, Amount(longest, tokens, vary, rest))
