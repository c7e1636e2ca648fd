"""vLLM's asynchronous scheduler with drafts: reserves places for them, and commits finished responses.

vLLM schedules a step while the one before runs, so before its drafts exist. The scheduler therefore reserves places for
the longest draft. The workers ask the server, and compute only the places that a draft fills (`speculator.py`). The
outcome of a step says how many these were.

The time of a step is the time from one `update_from_output` to the next, as with synchronous scheduling: the waits of
the workers for drafts lengthen it, and what the scheduler does meanwhile does not.
"""

import math
import time
from itertools import pairwise
from typing import Any

import numpy as np

from histospec.client import Draft, DraftClient
from histospec.client.engines.sessions import REPORT_SECONDS
from histospec.client.vllm.asynchronous.commits import ResponseCommits
from histospec.client.vllm.asynchronous.messages import Answers, Beginning, Order, order_of, outcome_of, put_order
from histospec.client.vllm.choice.worth import promise_of
from histospec.client.vllm.committing import CommittingScheduler
from histospec.client.vllm.interface import AsyncScheduler, ModelRunnerOutput, Request, SchedulerOutput
from histospec.client.vllm.patches.replacing import attach


class HistoSpecAsyncScheduler(CommittingScheduler, AsyncScheduler):
    """Takes the place of HistoSpecScheduler if `async_scheduling` is on; see patches/choosing.py."""

    _sessions: ResponseCommits

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._blank = [-1] * self._sessions.max_tokens  # vLLM's placeholders
        self._number = 0  # of the newest step
        self._heard = 0  # the number of the newest answers
        self._verify_cost: float | None = self._chooser.next()  # None: no drafts are asked for
        self._stepped = math.inf  # when the last step ended; infinite if the engine was idle
        self._probed = -math.inf  # when drafts were last asked for that no step verifies,
        self._probe = 0  # and the number of that step

    def _sessions_of(self, client: DraftClient, longest: int) -> ResponseCommits:
        return ResponseCommits(client, longest)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Reserves the places for drafts, and says what the workers ask for."""
        self._number += 1
        with self._harmless("reserve places"):
            self._reserve()
        step = super().schedule(*args, **kwargs)
        with self._harmless("order drafts"):
            put_order(step, self._order(step))
        return step

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Takes the answers of the server, calls vLLM, then sends the responses that have finished."""
        with self._harmless("learn"):
            for answers in outcome_of(model_runner_output).answers:
                if answers.number > self._heard:
                    self._hear(answers)
            self._learn(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self.requests:
            self._stepped, self._probed = math.inf, -math.inf  # the engine is idle from here on
            self._clock.idle()
        with self._harmless("settle", forget=True):
            self._sessions.settle()
        return outputs

    def _reserve(self) -> None:
        """Sets the number of placeholders of each request that is to generate."""
        most = self._most_places()
        for request in self.running:
            if not request.spec_token_ids:
                continue
            places = 0
            if self._verify_cost is not None and self._drafts(request):
                places = min(most, self._room(request, coming=request.num_output_placeholders > 0))
            request.spec_token_ids = self._blank[:places]

    def _most_places(self) -> int:
        """Returns the most places of a request.

        Reserved places use up the token budget of a step. Every running request gets its share, and while others wait,
        half of the budget is left for their prompts.
        """
        free = self.max_num_scheduled_tokens - len(self.running)
        if len(self.requests) > len(self.running):
            free //= 2
        return max(0, min(self._sessions.max_tokens, free // max(1, len(self.running))))

    def _drafts(self, request: Request) -> bool:
        """Returns whether the request gets drafts. vLLM checks a grammar before the drafts arrive."""
        return self._sessions.sent(request.request_id) is not None and not request.use_structured_output

    def _order(self, step: SchedulerOutput) -> Order:
        begun: dict[str, Beginning] = {}
        for new in step.scheduled_new_reqs:
            if (options := self._sessions.options(new.req_id)) is not None:
                begun[new.req_id] = Beginning(options, self._limits_of(self.requests[new.req_id]).bounds)
        cost = self._verify_cost
        if cost is None and self._chooser.curious and self._probe_is_due():
            self._probed, self._probe = time.perf_counter(), self._number
            cost = self._chooser.moderate
        return Order(self._number, cost, self._verify_cost is not None, self._chooser.value, begun)

    def _probe_is_due(self) -> bool:
        """Returns whether to ask for drafts that no step verifies: now and then, once the worker has tokens to send.

        Not in two steps in a row: the message after it says what the drafts were for.
        """
        due = time.perf_counter() - self._probed >= REPORT_SECONDS and self._number > self._probe + 1
        return due and any(request.num_output_tokens for request in self.running)

    def _hear(self, answers: Answers) -> None:
        """Learns from drafts of the server, which the workers have got."""
        self._heard = answers.number
        if answers.step == self._probe:
            ends = np.cumsum([0, *answers.lengths])
            tokens = np.zeros(len(answers.probs), np.int32)  # a promise does not depend on them
            drafts = [Draft(tokens[a:b], answers.probs[a:b]) for a, b in pairwise(ends)]
            self._chooser.promised(promise_of(drafts))
        else:
            self._minute.received(answers.waited, len(answers.lengths), [[0] * n for n in answers.lengths])

    def _learn(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Gives the step that ends now to the cost model, and takes the cost to ask for drafts with."""
        now = time.perf_counter()
        seconds, self._stepped = now - self._stepped, now
        verified = outcome_of(output).verified
        places = {request: len(blank) for request, blank in step.scheduled_spec_decode_tokens.items()}
        # vLLM's metrics leave these out; its accounts take them for rejected.
        attach(step, "num_invalid_spec_tokens", {each: places[each] - verified.get(each, 0) for each in places})
        drafted = sum(verified.values())
        self._minute.stepped(seconds, output.sampled_token_ids, drafted)
        if not drafted and math.isfinite(seconds) and self._chooser.passes():
            return
        sequences = len(step.num_scheduled_tokens)
        tokens = step.total_num_scheduled_tokens - sum(places.values()) + drafted
        generated = sum(map(len, output.sampled_token_ids))
        order = order_of(step)
        # Decisions reach the steps that are scheduled later.
        other = order is None or order.drafts != (self._verify_cost is not None)
        alone = other or tokens - drafted != sequences or self._clock.compiles(tokens)
        self._chooser.observe(self._clock.lap(), sequences, tokens, generated, alone)
        self._report(now)
        self._sessions.verify_cost = self._chooser.value
        self._verify_cost = self._chooser.next()
