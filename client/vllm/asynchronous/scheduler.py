"""vLLM's asynchronous scheduler with drafts: reserves places for them, and commits finished responses.

vLLM schedules a step while the one before runs, so before its drafts exist. It gives every request the same number of
places. This scheduler gives each its own (`places.py`). The workers ask the server and fill the places
(`speculator.py`).

The time of a step is the time from one `update_from_output` to the next, as with synchronous scheduling: the waits of
the workers for drafts lengthen it, and what the scheduler does meanwhile does not.
"""

import math
import time
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np

from histospec.client import Draft, DraftClient
from histospec.client.engines.options import RequestOptions
from histospec.client.vllm.asynchronous.commits import ResponseCommits
from histospec.client.vllm.asynchronous.messages import Answers, Order, answers_of, order_of, put_order
from histospec.client.vllm.asynchronous.places import DraftPlaces
from histospec.client.vllm.choice.worth import promise_of
from histospec.client.vllm.committing import REPORT_SECONDS, CommittingScheduler
from histospec.client.vllm.interface import AsyncScheduler, ModelRunnerOutput, Request, SchedulerOutput

LOOK = 8  # of the steps without places, one in 8 teaches nevertheless
IN_FLIGHT = 8  # steps whose answers may still arrive


class HistoSpecAsyncScheduler(CommittingScheduler, AsyncScheduler):
    """Takes the place of HistoSpecScheduler if `async_scheduling` is on; see patches/choosing.py."""

    _sessions: ResponseCommits

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._places = DraftPlaces(self._sessions.max_tokens)
        self._blank = [-1] * self._sessions.max_tokens  # vLLM's placeholders
        self._number = 0  # of the newest step
        self._heard = 0  # the number of the newest answers
        self._classes: deque[tuple[int, dict[str, int]]] = deque(maxlen=IN_FLIGHT)  # of the requests, by step
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
            for answers in answers_of(model_runner_output):
                if answers.number > self._heard:
                    self._hear(answers)
            self._learn(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self.requests:
            self._stepped = math.inf  # the engine is idle from here on
            self._clock.idle()
        with self._harmless("settle", forget=True):
            self._sessions.settle()
        return outputs

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._places.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _reserve(self) -> None:
        """Sets the number of placeholders of each request that is to generate."""
        numbers = self._places.numbers(self._chooser.price)
        classes: dict[str, int] = {}
        for request in self.running:
            if not request.spec_token_ids:
                continue
            places = 0
            if self._verify_cost is not None and self._drafts(request):
                each = self._places.class_of(request.request_id, request.num_output_tokens)
                classes[request.request_id] = each
                places = min(int(numbers[each]), self._room(request, coming=request.num_output_placeholders > 0))
            request.spec_token_ids = self._blank[:places]
        self._classes.append((self._number, classes))

    def _drafts(self, request: Request) -> bool:
        """Returns whether the request gets drafts. vLLM checks a grammar before the drafts arrive."""
        return self._sessions.sent(request.request_id) is not None and not request.use_structured_output

    def _order(self, step: SchedulerOutput) -> Order:
        begun: dict[str, RequestOptions] = {}
        for new in step.scheduled_new_reqs:
            if (options := self._sessions.options(new.req_id)) is not None:
                begun[new.req_id] = options
        cost = self._verify_cost
        if cost is None and self._chooser.curious and time.perf_counter() - self._probed >= REPORT_SECONDS:
            self._probed, self._probe = time.perf_counter(), self._number
            cost = self._chooser.moderate
        return Order(self._number, cost, self._verify_cost is not None, self._looks(), begun)

    def _looks(self) -> bool:
        """Returns whether to wait for the step before even if no place is reserved, to learn what drafts there are."""
        number, classes = self._classes[-1]
        return bool(classes) and (number % LOOK == 0 or not self._places.known(classes.values()))

    def _hear(self, answers: Answers) -> None:
        """Learns from drafts of the server, which the workers have got."""
        self._heard = answers.number
        classes = next((classes for step, classes in self._classes if step == answers.step), {})
        self._places.learn(
            [classes.get(each) for each in answers.requests],
            answers.requests, answers.ends, answers.lengths, answers.probs,
        )  # fmt: skip
        self._places.keep_only(self.requests)
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
        drafted = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        self._minute.stepped(seconds, output.sampled_token_ids, drafted)
        if not drafted and math.isfinite(seconds) and self._chooser.passes():
            return
        sequences, tokens = len(step.num_scheduled_tokens), step.total_num_scheduled_tokens
        generated = sum(map(len, output.sampled_token_ids))
        order = order_of(step)
        # Decisions reach the steps that are scheduled later.
        other = order is None or order.drafts != (self._verify_cost is not None)
        alone = other or tokens - drafted != sequences or self._clock.compiles(tokens)
        self._chooser.observe(self._clock.lap(), sequences, tokens, generated, alone)
        self._report(now)
        self._sessions.verify_cost = self._chooser.value
        self._verify_cost = self._chooser.next()
