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

import logging
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from histospec.client import Draft, DraftClient
from histospec.client.engines.alternatives import Step
from histospec.client.engines.harmless import Harmless
from histospec.client.engines.options import ONE_TOKEN, RequestOptions, read_options
from histospec.client.engines.reporting import MinuteReport
from histospec.client.engines.sessions import RequestSessions, known
from histospec.client.engines.versions import WeightVersions
from histospec.client.vllm import logs, settings
from histospec.client.vllm.choice.chooser import ModeChooser
from histospec.client.vllm.choice.model_drafter import ModelDrafter, model_drafter
from histospec.client.vllm.choice.prices import StepClock
from histospec.client.vllm.choice.worth import promise_of
from histospec.client.vllm.config import AdapterConfig
from histospec.client.vllm.coupled import alternatives
from histospec.client.vllm.coupled.seeding import RequestSeeds
from histospec.client.vllm.greeting import greet
from histospec.client.vllm.interface import (
    DraftTokenIds,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from histospec.client.vllm.no_rollout import why_no_rollout
from histospec.client.vllm.patches import weight_versions
from histospec.client.vllm.stops import StopStrings
from histospec.protocol.costs import DEFAULT_VERIFY_COST

logger = logging.getLogger("histospec.vllm")

# The policy wrote a response to its end if it stopped or reached its limit.
COMMITTED = frozenset(
    (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)
)
REPORT_SECONDS = 1.0  # between two messages while drafts cost too much to verify any


class HistoSpecScheduler(Scheduler):
    """The class for `--scheduler-cls`. Raises ValueError at the start if the configuration cannot work."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        logs.join_vllm()
        settings.check(vllm_config)
        speculative = vllm_config.speculative_config
        config = AdapterConfig.from_environment()
        client = DraftClient()
        settings.warn_of_processors()
        greet(client, speculative.num_speculative_tokens, "V2" if settings.runs_v2(vllm_config) else "V1")
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._sessions = RequestSessions(client, speculative.num_speculative_tokens, settings.runs_v2(vllm_config))
        self._stops = StopStrings(vllm_config.model_config)
        self._model = model_drafter(vllm_config, config.model_draft_tokens, config.verify_cost)
        self._chooser = _chooser(self._model, config.verify_cost)
        self._seeds = None if config.seeds is None else RequestSeeds(client.config.namespace, config.seeds)
        self._versions = WeightVersions()
        weight_versions.install()
        self._clock = StepClock(settings.computes_here(vllm_config.parallel_config))
        self._stepped = math.inf  # when the last step ended; infinite if the engine was idle
        self._silent = 0  # steps since drafts were asked for
        self._reported = -math.inf  # the end of the last step whose tokens the server was sent
        self._probed = False  # whether the drafts of a probe arrived in the newest step
        self._harmless = Harmless(self._forget)
        self._minute = MinuteReport()
        # Also if the process ends without shutdown, as a script with an engine in its process does.
        self._report_rest = weakref.finalize(self, _report_rest, self._minute, self._chooser)

    def add_request(self, request: Request) -> None:
        """Opens the session before the request runs, and once: a preempted request is not added again."""
        known = request.request_id in self.requests  # the next input of a streaming session
        super().add_request(request)
        if not known:
            with self._harmless("open"):
                self._open(request)

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

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """Closes the sessions of aborted requests at once: aborts arrive between steps, perhaps after the last one."""
        finished = super().finish_requests(request_ids, finished_status)
        with self._harmless("settle", forget=True):
            self._sessions.settle()
        return finished

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Ends the session of a request. Every request leaves the scheduler here, with its final tokens."""
        with self._harmless("finish"):
            output, whole = None, False
            try:
                output, whole = self._response(request)
            finally:
                self._sessions.finish(request.request_id, output, self._versions.current, whole)
            if output and whole:
                self._versions.wrote()
            if self._model is not None:
                self._model.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Counts a change of weights: in a vLLM without weight versions, this call is the only sign of it."""
        with self._harmless("count weights"):
            self._versions.reset()
            if self._model is not None:
                self._model.emptied()
        return super().reset_prefix_cache(*args, **kwargs)

    def _hear_weight_version(self, version: str) -> None:
        """Takes the version of the weights that the engine core got; see patches/weight_versions.py."""
        with self._harmless("read the version of the weights"):
            self._versions.name(version)

    def shutdown(self) -> None:
        """Reports the last steps, sends the last commits and ends the client, then shuts vLLM's scheduler down."""
        with self._harmless("shutdown"):
            self._report_rest()
            self._sessions.shut_down()
        super().shutdown()

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
        if (line := self._minute.line(now, self._chooser.value, self._chooser.learned)) is not None:
            logger.info("%s", line)
        self._sessions.verify_cost = self._chooser.value
        verify_cost = self._chooser.next()
        self._silent = self._silent + 1 if verify_cost is None else 0
        return verify_cost

    def _keep(self, found: Mapping[str, Step]) -> None:
        """Keeps the alternatives of this step's tokens, which the requests do not have yet."""
        for request_id, step in found.items():
            if (request := self.requests.get(request_id)) is not None:
                self._sessions.keep(request_id, request.num_output_tokens, step)

    def _open(self, request: Request) -> None:
        """Opens a session for a request that generates a response from tokens; other requests get none."""
        parameters = request.sampling_params
        embedded = request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None) is not None
        if parameters is None or embedded or request.resumable or not request.prompt_token_ids:
            return
        prompt = request.prompt_token_ids
        options = read_options(parameters.extra_args, len(prompt))
        why = why_no_rollout(parameters, options)
        if why == ONE_TOKEN and self._sessions.client.continues(prompt):
            why = ""  # the last token of a response that was aborted
        if why:
            self._minute.left_out(why)
            return
        if self._seeds is not None:
            options = options._replace(seed=self._seeds.give(request, options, self._epoch(options)))
        self._sessions.begin(request.request_id, prompt, options)

    def _epoch(self, options: RequestOptions) -> int:
        """Returns the version of the policy that will sample a request, as far as known; seeds change with it."""
        known = (options.epoch, self._versions.current.epoch, self._versions.current.changes)
        return next(epoch for epoch in known if epoch is not None)

    def _response(self, request: Request) -> tuple[Sequence[int] | None, bool]:
        """Returns the tokens that the request adds to the history, cut exactly, and whether it has them all.

        An aborted request may be continued by another one. None: nothing of the request is kept.
        """
        if self._sessions.sent(request.request_id) is None:
            return None, False
        end = self._stops.end(request)
        if end is not None:
            return request.output_token_ids[:end], True
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        kept = request.output_token_ids if aborted or request.status in COMMITTED else None
        return kept, not aborted

    def _certain(self, output: ModelRunnerOutput) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields the sampled tokens of requests of which vLLM will cut none."""
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if not tokens:  # a chunk of a prompt
                continue
            request = self.requests.get(request_id)
            sent = self._sessions.sent(request_id)
            if request is None or sent is None or sent != request.num_output_tokens or request.is_finished():
                continue
            if not _may_end(request, tokens, self.max_model_len):
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
        history = [known(drafts.get(request_id), self._vocabulary) for request_id in model.req_ids]
        if self._model is None:
            rows = [[] if draft is None else draft.tokens.tolist() for draft in history]
        else:
            rows = self._model.choose(model.req_ids, history, model.draft_token_ids, bool(drafts))
        return [row and row[: self._room(request_id)] for row, request_id in zip(rows, model.req_ids, strict=True)]

    def _room(self, request_id: str) -> int:
        """Returns how many drafted tokens the request can use in its next step, which also yields one more token."""
        request = self.requests.get(request_id)
        if request is None or request.is_prefill_chunk:
            return 0
        room = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens) - 1
        early = 0 if request.sampling_params is None else request.sampling_params.min_tokens
        if early > request.num_output_tokens:  # vLLM would also forbid a stop token after the draft
            room = min(room, early - request.num_output_tokens - 1)
        return max(0, min(room, self._sessions.max_tokens))

    def _forget(self) -> None:
        self._sessions.forget()


def _report_rest(minute: MinuteReport, chooser: ModeChooser) -> None:
    """Logs the steps since the last minute's line."""
    if (line := minute.rest(chooser.value, chooser.learned)) is not None:
        logger.info("%s", line)


def _chooser(model: ModelDrafter | None, verify_cost: float | None) -> ModeChooser:
    """Returns what decides about drafts. `verify_cost`: as the user has set it."""
    return ModeChooser(verify_cost) if model is None else model.chooser


def _may_end(request: Request, tokens: Sequence[int], max_model_len: int) -> bool:
    """Returns whether vLLM may end the request within these tokens. A wrong True only delays sending them a little."""
    parameters = request.sampling_params
    if parameters is None or parameters.repetition_detection is not None:
        return True
    new = len(tokens)
    if request.num_output_tokens + new >= request.max_tokens or request.num_tokens + new >= max_model_len:
        return True
    return parameters.eos_token_id in tokens or any(stop in tokens for stop in parameters.stop_token_ids or ())
