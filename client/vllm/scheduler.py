"""vLLM's scheduler with drafts: opens a session for every request, drafts in every step, commits finished responses.

A step of the engine is schedule, forward, sample, `update_from_output`, `update_draft_token_ids`. The scheduler sends
the sampled tokens at the start of `update_from_output` and receives the drafts in `update_draft_token_ids`: vLLM's
bookkeeping between the two hides the round trip. What need not wait for the sampled tokens is done in
`get_grammar_bitmask`, which vLLM calls while the model computes. vLLM cuts the tokens of a finishing request (stop
tokens, lengths) only within `update_from_output`. Tokens that it may cut therefore wait until then and go out with the
close, which asks for no draft.

The time of a step is the time from one `update_from_output` to the next, with everything between the forward passes: an
accepted token saves all of it. If vLLM pipelines batches, they end one after the other, and each interval is a step. If
the model computes in this process, on its CPU, the scheduler learns costs from CPU time.

A failure here never stops the engine: it is logged, and the requests go on without drafts.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from histospec.client.engines.alternatives import Step
from histospec.client.engines.sessions import REPORT_SECONDS, known
from histospec.client.vllm.choice.chooser import ModeChooser
from histospec.client.vllm.choice.model_drafter import model_drafter
from histospec.client.vllm.choice.worth import promise_of
from histospec.client.vllm.committing import CommittingScheduler
from histospec.client.vllm.coupled import alternatives
from histospec.client.vllm.interface import (
    DraftTokenIds,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
)
from histospec.protocol.costs import DEFAULT_VERIFY_COST


class HistoSpecScheduler(CommittingScheduler):
    """The class for `--scheduler-cls`. Raises ValueError at the start if the configuration cannot work."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._stepped = math.inf  # when the last step ended; infinite if the engine was idle
        self._silent = 0  # steps since drafts were asked for
        self._reported = -math.inf  # the end of the last step whose tokens the server was sent
        self._prepared = self._ready = UNPREPARED  # for the step that is computed, and for the one that has ended
        self._probed = False  # whether the drafts of a probe arrived in the newest step

    def _choosing(self, vllm_config: Any) -> ModeChooser:
        cost = self._config.verify_cost
        self._model = model_drafter(vllm_config, self._config.model_draft_tokens, cost)
        return ModeChooser(cost) if self._model is None else self._model.chooser

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Also tells the model's drafter how many tokens to make."""
        step = super().schedule(*args, **kwargs)
        if self._model is not None:
            with self._harmless("ask the model's drafter"):
                self._model.ask(step)
        return step

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """Also does what need not wait for the sampled tokens. vLLM calls this while the model computes the step."""
        grammar = super().get_grammar_bitmask(scheduler_output)
        with self._harmless("prepare", forget=True):
            for request_id in self._ready.requests:  # their last tokens left before vLLM kept them
                if (request := self.requests.get(request_id)) is not None:
                    self._agrees(request)
            if not self._silent:
                self._sessions.announce()  # the server looks them up meanwhile
                self._prepared = self._prepare(scheduler_output)
        return grammar

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Sends the sampled tokens, calls vLLM, then sends the tokens that vLLM might have cut."""
        verify_cost: float | None = DEFAULT_VERIFY_COST
        with self._harmless("learn"):
            verify_cost = self._learn(scheduler_output, model_runner_output)
        self._ready = self._prepared if self._prepared.step is scheduler_output else UNPREPARED
        rest: Sequence[str] = model_runner_output.req_ids
        if verify_cost is not None:
            with self._harmless("send", forget=True):
                certain, rest = self._divide(model_runner_output)
                self._sessions.ask(certain, verify_cost)
        if found := alternatives.of(model_runner_output):
            with self._harmless("keep alternatives"):
                self._keep(found)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self.requests:
            self._stepped, self._reported = math.inf, -math.inf  # the engine is idle from here on
            self._clock.idle()
        elif verify_cost is None and not self._probed and self._stepped - self._reported < REPORT_SECONDS:
            return outputs
        else:
            self._reported = self._stepped
        with self._harmless("settle", forget=True):
            remaining = self._remaining(rest)
            if verify_cost is not None:
                self._sessions.ask(remaining, verify_cost)
            elif self._chooser.curious and self.requests and not self._probed:
                self._sessions.probe(remaining, self._chooser.moderate)
            else:  # also after each probe, because the server shows the cost of the last step
                self._sessions.report(remaining)
            self._sessions.settle()
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Replaces the workers' drafts, or their empty ones, by the better drafts; vLLM checks these for grammars."""
        if self._silent > 1 and not any(draft_token_ids.draft_token_ids):
            return  # no drafts were asked for, so vLLM's empty ones stay
        rows: list[list[int]] | None = None
        with self._harmless("receive", forget=True):
            rows = self._receive(draft_token_ids)
        if rows is not None:
            super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, rows))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._prepared.requests.discard(request.request_id)
        if self._model is not None:
            with self._harmless("forget the model's drafts"):
                self._model.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Also tells the model's drafter that it has read nothing."""
        if self._model is not None:
            with self._harmless("forget what the model's drafter has read"):
                self._model.emptied()
        return super().reset_prefix_cache(*args, **kwargs)

    def _learn(self, step: SchedulerOutput, output: ModelRunnerOutput) -> float | None:
        """Gives the step that ends now to the cost model. Returns the cost to ask for the next drafts with."""
        now = time.perf_counter()
        seconds, self._stepped = now - self._stepped, now
        probed = self._sessions.probed()
        self._probed = len(probed) > 0
        if self._probed:
            self._chooser.promised(promise_of(probed))
            if self._model is not None:
                self._model.probed(probed)
        made = None if self._model is None else self._model.asked
        nothing = made is None and not step.scheduled_spec_decode_tokens and math.isfinite(seconds)
        if nothing and self._chooser.passes():
            self._minute.stepped(seconds, output.sampled_token_ids, 0)
            self._silent += 1
            return None
        sequences, tokens = len(step.num_scheduled_tokens), step.total_num_scheduled_tokens
        drafted = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        generated = sum(map(len, output.sampled_token_ids))
        alone = tokens - drafted != sequences or self._clock.compiles(tokens)
        lap = self._clock.lap()
        if self._model is not None:
            self._sessions.verified(self._model.learn(step, output))
        self._chooser.observe(lap, sequences, tokens, generated, alone, made)
        self._minute.stepped(seconds, output.sampled_token_ids, drafted)
        self._report(now)
        self._sessions.verify_cost = self._chooser.value
        verify_cost = self._chooser.next()
        self._silent = self._silent + 1 if verify_cost is None else 0
        return verify_cost

    def _keep(self, found: Mapping[str, Step]) -> None:
        """Keeps the alternatives of this step's tokens, which the requests do not have yet."""
        for request_id, step in found.items():
            if (request := self.requests.get(request_id)) is not None:
                self._sessions.keep(request_id, request.num_output_tokens, step)

    def _prepare(self, step: SchedulerOutput) -> "_Prepared":
        """Finds the requests of a step that only a stop token can end, however many tokens it yields."""
        longest = self._sessions.max_tokens + 1
        prepared = _Prepared(step, set(), set())
        for request_id in step.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or not self._agrees(request):
                continue
            limits, length = self._limits_of(request), request.num_output_tokens
            room = limits.bounds.least_room(length, longest)
            if length + longest < limits.sure and room >= self._sessions.max_tokens:
                prepared.requests.add(request_id)
                prepared.stops.update(limits.stops)
        return prepared

    def _agrees(self, request: Request) -> bool:
        """Returns whether the session has exactly the request's tokens; begins it again if it was sent more.

        Then vLLM discarded the step of this request (a reset, a failed load).
        """
        sent = self._sessions.sent(request.request_id)  # None also for a request that has ended
        if sent is not None and sent > request.num_output_tokens:
            self._sessions.restart(request.request_id)
            sent = 0
        return sent == request.num_output_tokens

    def _divide(self, output: ModelRunnerOutput) -> tuple[dict[str, list[int]], list[str]]:
        """Returns the sampled tokens of requests of which vLLM will cut none, and the other requests."""
        _, ready, stops = self._ready
        requests, sampled = output.req_ids, output.sampled_token_ids
        certain = dict(zip(requests, sampled, strict=False))
        if ready.issuperset(requests) and all(sampled) and stops.isdisjoint(chain.from_iterable(sampled)):
            return certain, []
        certain = {
            request_id: tokens
            for request_id, tokens in certain.items()
            if (tokens and request_id in ready and stops.isdisjoint(tokens)) or self._is_certain(request_id, tokens)
        }
        return certain, [request_id for request_id in requests if request_id not in certain]

    def _is_certain(self, request_id: str, tokens: Sequence[int]) -> bool:
        if not tokens or (request := self.requests.get(request_id)) is None:  # no tokens: a chunk of a prompt
            return False
        limits = self._limits_of(request)
        length = request.num_output_tokens + len(tokens)
        return self._agrees(request) and length < limits.sure and limits.stops.isdisjoint(tokens)

    def _remaining(self, requests: Iterable[str]) -> dict[str, Sequence[int]]:
        """Returns the tokens of running requests that their sessions were not sent yet."""
        remaining: dict[str, Sequence[int]] = {}
        for request_id in requests:
            request = self.requests.get(request_id)
            if request is not None and not self._agrees(request):
                sent = self._sessions.sent(request_id)
                if sent is not None:
                    remaining[request_id] = request.output_token_ids[sent:]
        return remaining

    def _receive(self, model: DraftTokenIds) -> list[list[int]] | None:
        """Returns one draft per request, no longer than it can use: the server's or that of the model's own drafter.

        None: there are none, so vLLM's empty ones stay; scheduling has taken the last drafts.
        """
        began = time.perf_counter()
        if self._model is None:
            tokens = self._sessions.collect_tokens(self._vocabulary)
            waited, answered = time.perf_counter() - began, len(tokens)
            if not tokens:
                return None
            rows = [tokens.get(request_id) or [] for request_id in model.req_ids]
        else:
            drafts = self._sessions.collect()
            waited, answered = time.perf_counter() - began, len(drafts)
            history = [known(drafts.get(request_id), self._vocabulary) for request_id in model.req_ids]
            rows = self._model.choose(model.req_ids, history, model.draft_token_ids, bool(drafts))
        ready = self._ready.requests
        if not ready.issuperset(model.req_ids):
            for i, request_id in enumerate(model.req_ids):
                if rows[i] and request_id not in ready:
                    rows[i] = rows[i][: self._places(request_id)]
        self._minute.received(waited, answered, rows)
        return rows

    def _places(self, request_id: str) -> int:
        """Returns how many drafted tokens the request's next step can verify."""
        request = self.requests.get(request_id)
        return 0 if request is None or request.is_prefill_chunk else self._room(request)


class _Prepared(NamedTuple):
    """What was prepared while the model computed a step.

    Attributes:
        step: the step.
        requests: those of its requests whose sessions have all their tokens, that no length ends in this step or the
            next, and that can use the longest draft after it.
        stops: the tokens that may end one of them.
    """

    step: object
    requests: set[str]
    stops: set[int | None]


UNPREPARED = _Prepared(None, set(), set())
