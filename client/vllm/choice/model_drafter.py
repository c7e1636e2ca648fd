"""Runs the choice in an engine's steps: asks the model's drafter for tokens, picks drafts, learns from the results.

The drafter of a step runs after its forward pass, so vLLM verifies its tokens in the next step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histospec.client.engines.sessions import Verified
from histospec.client.vllm.choice.chooser import ModeChooser
from histospec.client.vllm.choice.drafts import Choice, Row, levels
from histospec.client.vllm.choice.modes import REST, Limits
from histospec.client.vllm.choice.worth import LevelGains
from histospec.client.vllm.patches import drafter

if TYPE_CHECKING:
    from histospec.client import Draft
    from histospec.client.vllm.interface import ModelRunnerOutput, SchedulerOutput

VARIABLE = frozenset(("draft_model", "eagle", "eagle3", "mtp"))
"""Methods whose drafters make as many tokens as a step says. Others make `num_speculative_tokens` or fewer."""

LOOKED_AT = 4  # one in 4 of the steps in which only the server drafts is looked at

FEW = 16  # steps of a request that the drafter may have missed
HEALS = 16  # steps with the drafter after which one missed step counts no more
NO_PROMPT = 1 << 20  # a missed prompt counts as this many steps


class DrafterCoverage:
    """The steps of each request that the drafter has missed. Not thread-safe.

    A resting drafter also skips its first pass, which computes the keys and values that later passes read. Its drafts
    for requests that ran during a rest of many steps would be poor, so these get none. A short gap matters less the
    more text follows it.
    """

    def __init__(self) -> None:
        self._missed: dict[str, tuple[int, int]] = {}  # steps, and the number of steps with the drafter until then
        self._ran = 0  # steps with the drafter
        self._left_out = False  # whether it missed prompts since the cache was last emptied

    def ran(self) -> None:
        """Notes a step with the drafter."""
        self._ran += 1

    def left_out(self, requests: Mapping[str, bool]) -> None:
        """Notes a step without the drafter's first pass: its requests, and whether it read part of their prompts."""
        for request, prompt in requests.items():
            self._missed[request] = self._count(request) + (NO_PROMPT if prompt else 1), self._ran
            self._left_out |= prompt

    def cached(self, request: str) -> None:
        """Notes that part of a prompt came from the cache: the drafter may have rested when it was computed."""
        if self._left_out:
            self._missed[request] = NO_PROMPT, self._ran

    def emptied(self) -> None:
        """Notes that the cache of prompts is empty."""
        self._left_out = False

    def covers(self, request: str) -> bool:
        """Returns whether the drafter has made a pass over the request's text, except for at most FEW steps."""
        return self._count(request) <= FEW

    def share(self, requests: Collection[str]) -> float:
        """Returns the share of the requests that are covered; 1 if there are none."""
        if not self._missed or not requests:
            return 1.0
        return sum(map(self.covers, requests)) / len(requests)

    def forget(self, request: str) -> None:
        """Removes a request that has left."""
        self._missed.pop(request, None)

    def _count(self, request: str) -> int:
        missed, at = self._missed.get(request, (0, 0))
        return missed if missed >= NO_PROMPT else max(0, missed - (self._ran - at) // HEALS)


class ModelDrafter:
    """Combines the drafts of the model's own drafter with those of the server. Not thread-safe."""

    def __init__(self, limits: Limits, verify_cost: float | None = None) -> None:
        """Takes what the drafter can do. `verify_cost`: as for ModeChooser."""
        self._limits = limits
        self._choice = Choice(limits.longest)
        self._gains = LevelGains(limits.longest)
        self._coverage = DrafterCoverage()
        self.chooser = ModeChooser(verify_cost, limits, (self._choice.outcomes, self._gains))
        self._asked = limits.longest  # tokens of the next drafts
        self._rows: dict[str, Row] = {}  # the drafts that vLLM is verifying
        self._alone = False  # whether only the model drafted them
        self._silent = 0  # steps in which the model did not draft, counted to LOOKED_AT
        self._zeroed: Sequence[str] = ()  # requests for which vLLM drafted zeros in the newest step

    @property
    def asked(self) -> int | None:
        """How many tokens the drafter made in the step that ends; None: it rested."""
        return None if self._asked == REST else self._asked

    def ask(self, step: "SchedulerOutput") -> None:
        """Sets how many tokens the drafter makes in a step that was scheduled, and that goes to vLLM's workers."""
        if not step.num_scheduled_tokens:
            return
        verified = step.scheduled_spec_decode_tokens
        prompts = {r: n - len(verified.get(r, ())) > 1 for r, n in step.num_scheduled_tokens.items()}
        for new in step.scheduled_new_reqs:
            if new.num_computed_tokens:
                self._coverage.cached(new.req_id)
        self.chooser.read = self._coverage.share(prompts)
        self._asked = self.chooser.number(len(prompts), any(prompts.values()))
        if self._limits.follows_steps:
            step.num_spec_tokens_to_schedule = self._asked
        if self._zeroed:  # those that have not left since
            self._coverage.left_out({request: False for request in self._zeroed if request in prompts})
            self._zeroed = ()
        if self._asked == REST:
            self._coverage.left_out(prompts)
        else:
            self._coverage.ran()

    def probed(self, drafts: "Sequence[Draft]") -> None:
        """Learns from drafts of the server that no step verifies."""
        self._gains.saw_levels(_levels(drafts))

    def choose(
        self,
        requests: Sequence[str],
        history: Sequence["Draft | None"],
        model: Sequence[Sequence[int]],
        asked: bool,
    ) -> list[list[int]]:
        """Returns the draft to verify for each request.

        Args:
            requests: the ids of the requests.
            history: the server's drafts; None or empty if there is none.
            model: the drafts of the model's drafter; longer ones than were asked for do not count.
            asked: whether the server was asked for drafts; if not, their absence teaches nothing.
        """
        if all(len(row) == self._limits.longest and not any(row) for row in model):
            # Near the end of the longest context vLLM drafts zeros for every request, without the drafter. A single
            # row of zeros is a real draft: for example the token of id 0, if drafts have one token.
            self._zeroed = requests
            model = [()] * len(requests)
        drafts = [self._made(row, request) for row, request in zip(model, requests, strict=True)]
        if not any(drafts):
            self._rows, self._alone = {}, False
            self._silent = (self._silent + 1) % LOOKED_AT
            if asked and self._silent == 0:
                self._gains.saw_levels(_levels(history))
            return [[] if draft is None else draft.tokens.tolist() for draft in history]
        if not asked:
            self._rows, self._alone = {}, True
            return self._choice.alone(drafts, self.chooser.price)
        self._alone = False
        chosen, gains = self._choice.choose(requests, history, drafts, self.chooser.price)
        self._gains.saw_levels(gains.level)
        self._gains.saw(gains, np.array([self._coverage.covers(request) for request in requests]))
        self._rows = dict(zip(requests, chosen, strict=True))
        return [row.tokens for row in chosen]

    def learn(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> Iterator[Verified]:
        """Learns from the step that ends. Yields what it has verified, if any of it was the model's."""
        if self._alone:
            self._alone = False
            yield from self._learn_alone(step, output)
            return
        rows, self._rows = self._rows, {}
        self._choice.learn(output.req_ids, output.sampled_token_ids, rows)
        if not rows:
            return  # all drafts were the server's, which needs no report of it
        for request, came in zip(output.req_ids, output.sampled_token_ids, strict=False):
            verified = len(step.scheduled_spec_decode_tokens.get(request, ()))
            row = rows.get(request)
            shared = verified if row is None or not row.by_model else min(row.shared, verified)
            accepted = max(0, min(len(came) - 1, verified) - shared)
            yield Verified(request, shared, verified - shared, accepted)

    def _learn_alone(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> Iterator[Verified]:
        drafts = step.scheduled_spec_decode_tokens
        for request, came in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if came:
                verified = len(drafts.get(request, ()))
                accepted = min(len(came) - 1, verified)
                self._choice.learn_alone(request, verified, accepted)
                if verified:
                    yield Verified(request, 0, verified, accepted)

    def forget(self, request: str) -> None:
        """Removes a request that has left."""
        self._choice.forget(request)
        self._coverage.forget(request)

    def emptied(self) -> None:
        """Notes that vLLM's cache of prompts is empty."""
        self._coverage.emptied()

    def _made(self, row: Sequence[int], request: str) -> Sequence[int]:
        """Returns the draft of the model; an empty one if it is poor or not a draft."""
        usable = len(row) <= self._asked and min(row, default=0) >= 0 and self._coverage.covers(request)
        return row[: self._limits.most] if usable else ()


def model_drafter(vllm_config: Any, tokens: int | None, verify_cost: float | None) -> ModelDrafter | None:
    """Returns the ModelDrafter for the engine of a VllmConfig; None if only the server drafts.

    If data-parallel ranks share a model's layers, all of them have to make the same passes, so nothing varies.
    `tokens`: see `fixed` of Limits. `verify_cost`: see ModeChooser.
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
    return ModelDrafter(Limits(longest, tokens, vary, rest), verify_cost)


def _levels(drafts: "Sequence[Draft | None]") -> NDArray[np.int64]:
    """Returns int[B], the level of the first token of each of the server's drafts."""
    firsts = [draft.probs[0] if draft is not None and len(draft) else 0.0 for draft in drafts]
    return levels(np.array(firsts, np.float32))
