"""Runs the choice in an engine's steps: asks the model's drafter for tokens, picks drafts, learns from what came.

A step's drafter runs after its forward pass, so what is asked for when a step is scheduled is verified in the next.
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
"""Methods whose drafters make as many tokens as a step says. The others make `num_speculative_tokens` or fewer."""

LONGER = 0.4
"""Share of the cost with which the server is asked for drafts. Tokens that the model drafts, too, are surer than the
server knows, so that longer drafts pay; those that do not are cut when both are compared."""

STUDIED = 8  # of the steps in which only the model drafts, the share that is learned from,
FIRST_STUDIED = 64  # and so many at first

LATELY = 0.98  # a step's share in the speed-up: of the last fifty or so


class Verified(NamedTuple):
    """What a step verified of a request's drafts.

    Attributes:
        request: its id.
        history: tokens of the server's draft, from its first on.
        drafted: tokens of the model's draft beyond those that the server drafted, too.
        accepted: so many of these.
    """

    request: str
    history: int
    drafted: int
    accepted: int


class ModelDrafter:
    """Combines the drafts of the model's own drafter with those of the server. Not thread-safe."""

    def __init__(self, longest: int, amount: Amount) -> None:
        """Drafts of at most `longest` tokens, of which the drafter makes as many as `amount` says."""
        self._longest = longest
        self._amount = amount
        self._choice = Choice(longest)
        self._asked = longest  # tokens of the drafts that come next
        self._rows: dict[str, Row] = {}  # that are being verified
        self._yield = STARTING_SPEED_UP
        self._alone = 0  # steps in which only the model drafted
        self._zeroed: Sequence[str] = ()  # requests for which vLLM drafted zeros instead in the newest step
        self._cost: DrafterCost | None = None

    @property
    def asked(self) -> int | None:
        """Tokens that the drafter made in the step that ends; None: it rested."""
        return None if self._asked == REST else self._asked

    @property
    def asks_at(self) -> float:
        """The share of the cost with which to ask the server for the drafts that are compared next."""
        return LONGER if self._asked > 0 else 1.0

    def ask(self, step: "SchedulerOutput", cost: DrafterCost | None, server: bool = True, pause: bool = False) -> None:
        """Tells the step that was scheduled how many tokens the drafter makes in it.

        Args:
            step: vLLM's, which goes to its workers.
            cost: of the drafter; None: not known yet.
            server: it is asked for drafts in these steps, too.
            pause: the drafter is to be left out of this step.
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
        """The draft of each request that is to be verified.

        Args:
            requests: their ids.
            history: the server's drafts; None or empty where there is none.
            model: those of the model's drafter; of other lengths than was asked for, they are no drafts.
            cost: of verifying a token, in plain steps.
            asked: whether the server was asked for drafts; nothing is learned of when it has some if it was not.
        """
        if all(len(row) == self._longest and not any(row) for row in model):
            # Near the end of the longest context vLLM drafts zeros for every request, and asks no drafter. A single
            # row of zeros is a draft like any other: where a draft has one token, that of id 0.
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
            depth = self._choice.outcomes.depth(cost * self._yield)
            self._rows = {r: Row(list(draft[:depth]), 0, True) for r, draft in zip(requests, drafts, strict=True)}
            return [row.tokens for row in self._rows.values()]
        chosen, gains = self._choice.choose(requests, history, drafts, cost * self._yield)
        if asked:
            self._amount.saw_levels(gains.level)
        self._amount.saw(gains, np.array([self._amount.whole(request) for request in requests]))
        self._rows = dict(zip(requests, chosen, strict=True))
        return [row.tokens for row in chosen]

    def learn(self, step: "SchedulerOutput", output: "ModelRunnerOutput", cost: float) -> Iterator[Verified]:
        """What the step that ends has verified; learns from it. `cost` is that of verifying a token, in plain steps."""
        rows, self._rows = self._rows, {}
        self._choice.learn(output.req_ids, output.sampled_token_ids, rows)
        tokens = steps = drafted = 0
        for request, came in zip(output.req_ids, output.sampled_token_ids, strict=False):
            verified = len(step.scheduled_spec_decode_tokens.get(request, ()))
            if came:
                tokens, steps, drafted = tokens + len(came), steps + 1, drafted + verified
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
        """The request has left."""
        self._choice.forget(request)
        self._amount.forget(request)

    def emptied(self) -> None:
        """vLLM's cache of prompts is empty."""
        self._amount.emptied()

    def _made(self, row: Sequence[int], request: str) -> Sequence[int]:
        """The draft of the model; none where it is poor, or no draft."""
        usable = len(row) <= self._asked and min(row, default=0) >= 0 and self._amount.whole(request)
        return row[: self._amount.most] if usable else ()


def model_drafter(vllm_config: Any, tokens: int | None) -> ModelDrafter | None:
    """For the engine of a VllmConfig; None: its drafts are the server's alone. `tokens`: see Amount, `fixed`.

    Where data-parallel ranks share a model's layers, all of them have to make the same passes, so nothing varies there.
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
