"""vLLM's scheduler with drafts: opens a session for every request, drafts in every step, commits finished responses.

A step of the engine is schedule, forward, sample, `update_from_output`, `update_draft_token_ids`. The scheduler sends
the sampled tokens at the start of `update_from_output` and receives the drafts in `update_draft_token_ids`: vLLM's
bookkeeping between the two hides the round trip. vLLM cuts the tokens of a finishing request (stop tokens, lengths)
only within `update_from_output`. Tokens that it may cut therefore wait until then and go out with the close, which asks
for no draft.

The time of a step is the time from one `update_from_output` to the next, with everything between the forward passes: an
accepted token saves all of it. If vLLM pipelines batches, they end one after the other, and each interval is a step. If
the model computes in this process, on its CPU, the scheduler learns costs from CPU time.

A failure here never stops the engine: it is logged, and the requests go on without drafts.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from histospec.client import Draft
from histospec.client.engines.alternatives import Step
from histospec.client.engines.sessions import REPORT_SECONDS, known, known_tokens
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
        self._probed = False  # whether the drafts of a probe arrived in the newest step

    def _choosing(self, vllm_config: Any) -> ModeChooser:
        cost = self._config.verify_cost
        self._model = model_drafter(vllm_config, self._config.model_draft_tokens, cost)
        return ModeChooser(cost) if self._model is None else self._model.chooser

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Announces new sessions, so that the server looks them up while the model computes."""
        if not self._silent:
            with self._harmless("announce", forget=True):
                self._sessions.announce()
        step = super().schedule(*args, **kwargs)
        if self._model is not None:
            with self._harmless("ask the model's drafter"):
                self._model.ask(step)
        return step

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Sends the sampled tokens, calls vLLM, then sends the tokens that vLLM might have cut."""
        verify_cost: float | None = DEFAULT_VERIFY_COST
        with self._harmless("learn"):
            verify_cost = self._learn(scheduler_output, model_runner_output)
        if verify_cost is not None:
            with self._harmless("send", forget=True):
                self._sessions.ask(self._certain(model_runner_output), verify_cost)
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
            remaining = self._remaining(model_runner_output)
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
        drafts: dict[str, Draft] = {}
        waited = -time.perf_counter()
        with self._harmless("receive", forget=True):
            drafts = self._sessions.collect()
        waited += time.perf_counter()
        if not drafts and self._model is None:
            return  # no drafts arrived, so vLLM's empty ones stay; scheduling has taken the last drafts
        rows: list[list[int]] = [[] for _ in draft_token_ids.req_ids]
        with self._harmless("receive", forget=True):
            rows = self._rows(drafts, draft_token_ids)
            self._minute.received(waited, len(drafts), rows)
        super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, rows))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
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

    def _certain(self, output: ModelRunnerOutput) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields the sampled tokens of requests of which vLLM will cut none."""
        requests, sent = self.requests, self._sessions.sent
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if not tokens or (request := requests.get(request_id)) is None:  # no tokens: a chunk of a prompt
                continue
            length = request.num_output_tokens
            if sent(request_id) != length:  # also of a request that has ended: it has no session
                continue
            limits = self._limits_of(request)
            if length + len(tokens) < limits.sure and limits.stops.isdisjoint(tokens):
                yield request_id, tokens

    def _remaining(self, output: ModelRunnerOutput) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields the tokens of running requests that their sessions were not sent yet."""
        for request_id in output.req_ids:
            request = self.requests.get(request_id)
            sent = self._sessions.sent(request_id)
            if request is None or sent is None or sent == request.num_output_tokens:
                continue
            if sent > request.num_output_tokens:  # vLLM discarded the step of this request (a reset, a failed load)
                self._sessions.restart(request_id)
                sent = 0
            yield request_id, request.output_token_ids[sent:]

    def _rows(self, drafts: Mapping[str, Draft], model: DraftTokenIds) -> list[list[int]]:
        """Returns one draft per request, no longer than it can use: the server's or that of the model's own drafter."""
        if self._model is None:
            rows = [known_tokens(drafts.get(request_id), self._vocabulary) for request_id in model.req_ids]
        else:
            history = [known(drafts.get(request_id), self._vocabulary) for request_id in model.req_ids]
            rows = self._model.choose(model.req_ids, history, model.draft_token_ids, bool(drafts))
        return [row and row[: self._places(request_id)] for row, request_id in zip(rows, model.req_ids, strict=True)]

    def _places(self, request_id: str) -> int:
        """Returns how many drafted tokens the request's next step can verify."""
        request = self.requests.get(request_id)
        return 0 if request is None or request.is_prefill_chunk else self._room(request)
