"""Everything of vLLM's scheduler that the adapter depends on. vLLM does not declare these names public.

Type checkers see these declarations and need no vLLM; at run time the names are vLLM's own classes. `python -m
scripts.vllm_versions` looks for every declared name in vLLM's sources; needs.py has the names beyond the scheduler.
"""
# ruff: noqa: D102 - vLLM documents the methods

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:

    class SamplingParams(Protocol):
        """The sampling parameters of a request."""

        max_tokens: int | None
        temperature: float
        seed: int | None
        eos_token_id: int | None
        stop_token_ids: Sequence[int] | None
        stop: str | Sequence[str] | None
        min_tokens: int
        prompt_logprobs: int | None
        repetition_detection: Any
        extra_args: Mapping[str, Any] | None

    class Request(Protocol):
        """A request inside the engine core."""

        request_id: str
        prompt_token_ids: list[int] | None
        sampling_params: SamplingParams | None
        output_token_ids: Sequence[int]
        spec_token_ids: list[int]
        num_output_tokens: int
        num_tokens: int
        num_output_placeholders: int
        max_tokens: int
        is_prefill_chunk: bool
        resumable: bool
        use_structured_output: bool
        status: Any

    class NewRequestData(Protocol):
        """A request that a step computes for the first time."""

        req_id: str
        num_computed_tokens: int

    class SchedulerOutput(Protocol):
        """The work of one step."""

        scheduled_new_reqs: list[NewRequestData]
        num_scheduled_tokens: dict[str, int]
        total_num_scheduled_tokens: int
        scheduled_spec_decode_tokens: dict[str, list[int]]
        num_spec_tokens_to_schedule: int

    class ModelRunnerOutput(Protocol):
        """The sampled tokens of one forward pass; row i belongs to req_ids[i]."""

        req_ids: list[str]
        sampled_token_ids: list[list[int]]

    @dataclass
    class DraftTokenIds:
        """Drafts for the next step; row i belongs to req_ids[i]."""

        req_ids: list[str]
        draft_token_ids: list[list[int]]

    class RequestStatus:
        """The status of a request; here the finished ones that HistoSpec distinguishes."""

        FINISHED_STOPPED: "RequestStatus"
        FINISHED_LENGTH_CAPPED: "RequestStatus"
        FINISHED_REPETITION: "RequestStatus"
        FINISHED_ABORTED: "RequestStatus"

    class Scheduler:
        """The methods that the adapter extends, and the state that they read."""

        vllm_config: Any
        requests: dict[str, Request]
        running: list[Request]
        max_model_len: int
        max_num_scheduled_tokens: int

        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: Request) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any: ...
        def update_from_output(
            self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
        ) -> Any: ...
        def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None: ...
        def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any: ...
        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool: ...
        def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any: ...
        def shutdown(self) -> None: ...

    class AsyncScheduler(Scheduler):
        """The scheduler with `async_scheduling` on."""

else:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

__all__ = [
    "AsyncScheduler",
    "DraftTokenIds",
    "ModelRunnerOutput",
    "NewRequestData",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerOutput",
]
