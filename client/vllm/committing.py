"""The schedulers' common part: opens a session for each rollout, and commits its finished response.

A failure here never stops the engine: it is logged, and the requests go on without drafts.
"""

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from histospec.client import DraftClient
from histospec.client.engines.harmless import Harmless
from histospec.client.engines.options import ONE_TOKEN, Bounds, RequestOptions, read_options
from histospec.client.engines.reporting import MinuteReport
from histospec.client.engines.sessions import RequestSessions
from histospec.client.engines.versions import WeightVersions
from histospec.client.vllm import logs, settings
from histospec.client.vllm.choice.chooser import ModeChooser
from histospec.client.vllm.choice.prices import StepClock
from histospec.client.vllm.config import AdapterConfig
from histospec.client.vllm.coupled.seeding import RequestSeeds
from histospec.client.vllm.greeting import greet
from histospec.client.vllm.interface import Request, RequestStatus, Scheduler
from histospec.client.vllm.no_rollout import why_no_rollout
from histospec.client.vllm.patches import weight_versions
from histospec.client.vllm.stops import StopStrings

logger = logging.getLogger("histospec.vllm")

# The policy wrote a response to its end if it stopped or reached its limit.
COMMITTED = frozenset(
    (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)
)


class Limits(NamedTuple):
    """What ends a response.

    Attributes:
        bounds: the lengths between which it may end.
        stops: tokens that may end it.
        sure: a shorter response ends only with such a token.
    """

    bounds: Bounds
    stops: frozenset[int | None]
    sure: int

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> "Limits":
        """Returns those of a request."""
        parameters = request.sampling_params
        most = min(request.max_tokens, max_model_len - (request.num_tokens - request.num_output_tokens))
        if parameters is None:
            return cls(Bounds(0, most), frozenset(), 0)
        stops = frozenset((parameters.eos_token_id, *(parameters.stop_token_ids or ())))
        return cls(Bounds(parameters.min_tokens, most), stops, most if parameters.repetition_detection is None else 0)


class CommittingScheduler(Scheduler):
    """Raises ValueError at the start if the configuration cannot work."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        logs.join_vllm()
        settings.check(vllm_config)
        self._config = AdapterConfig.from_environment()
        client = DraftClient()
        settings.warn_of_processors()
        longest: int = vllm_config.speculative_config.num_speculative_tokens
        greet(client, longest, "V2" if settings.runs_v2(vllm_config) else "V1")
        self._position_noise = settings.runs_v2(vllm_config)
        self._sessions = self._sessions_of(client, longest)
        self._stops = StopStrings(vllm_config.model_config)
        self._chooser = self._choosing(vllm_config)
        seeds = self._config.seeds
        self._seeds = None if seeds is None else RequestSeeds(client.config.namespace, seeds)
        self._versions = WeightVersions()
        weight_versions.install()
        self._clock = StepClock(settings.computes_here(vllm_config.parallel_config))
        self._harmless = Harmless(self._forget)
        self._minute = MinuteReport()
        self._limits: dict[str, Limits] = {}  # by request; each step reads them
        # Also if the process ends without shutdown, as a script with an engine in its process does.
        self._report_rest = weakref.finalize(self, _report_rest, self._minute, self._chooser)

    def _sessions_of(self, client: DraftClient, longest: int) -> RequestSessions:
        """Returns the sessions of the requests. `longest`: the longest draft, in tokens."""
        return RequestSessions(client, longest, self._position_noise)

    def _choosing(self, vllm_config: Any) -> ModeChooser:
        """Returns what decides whether drafts pay."""
        return ModeChooser(self._config.verify_cost)

    def add_request(self, request: Request) -> None:
        """Opens the session before the request runs, and once: a preempted request is not added again."""
        known = request.request_id in self.requests  # the next input of a streaming session
        super().add_request(request)
        if not known:
            with self._harmless("open"):
                self._open(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """Closes the sessions of aborted requests at once: aborts arrive between steps, perhaps after the last one."""
        finished = super().finish_requests(request_ids, finished_status)
        with self._harmless("settle", forget=True):
            self._sessions.settle()
        return finished

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Ends the session of a request. Every request leaves the scheduler here, with its final tokens."""
        self._limits.pop(request.request_id, None)
        with self._harmless("finish"):
            output, whole = None, False
            try:
                output, whole = self._response(request)
            finally:
                self._sessions.finish(request.request_id, output, self._versions.current, whole)
            if output and whole:
                self._versions.wrote()
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Counts a change of weights: in a vLLM without weight versions, this call is the only sign of it."""
        with self._harmless("count weights"):
            self._versions.reset()
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

    def _report(self, now: float) -> None:
        """Logs the line of the last minute if it is over."""
        if (line := self._minute.line(now, self._chooser.value, self._chooser.learned)) is not None:
            logger.info("%s", line)

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

    def _room(self, request: Request, coming: int = 0) -> int:
        """Returns how many drafted tokens the request can use in its next step, which also yields one more token.

        `coming`: how many tokens at least the steps in flight yield.
        """
        return min(self._limits_of(request).bounds.room(request.num_output_tokens + coming), self._sessions.max_tokens)

    def _limits_of(self, request: Request) -> Limits:
        """Returns what ends the response of a request."""
        if (limits := self._limits.get(request.request_id)) is None:
            limits = Limits.of(request, self.max_model_len)
            if not request.resumable:  # the next input of a streaming session changes them
                self._limits[request.request_id] = limits
        return limits

    def _forget(self) -> None:
        self._sessions.forget()


def _report_rest(minute: MinuteReport, chooser: ModeChooser) -> None:
    """Logs the steps since the last minute's line."""
    if (line := minute.rest(chooser.value, chooser.learned)) is not None:
        logger.info("%s", line)
