"""What the adapter relies on in SGLang. SGLang does not declare these names public.

Type checkers see these declarations and need no SGLang.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class SamplingParams(Protocol):
    """The sampling parameters of a request, normalized by SGLang."""

    max_new_tokens: int
    custom_params: Mapping[str, Any] | None


class Req(Protocol):
    """A request inside a scheduler."""

    rid: str
    origin_input_ids_unpadded: Sequence[int]
    output_ids: Sequence[int]
    output_ids_through_stop: Sequence[int]
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    input_embeds: Any
    to_finish: Any
    finished_reason: Any

    def finished(self) -> bool: ...  # noqa: D102 - SGLang documents it


class ScheduleBatch(Protocol):
    """The requests of one forward pass."""

    reqs: Sequence[Req]


class Scheduler(Protocol):
    """SGLang's scheduler: one per rank, each in a process of its own."""

    server_args: Any
    waiting_queue: Sequence[Req]
    enable_overlap: bool
    is_generation: bool
    spec_algorithm: Any
    draft_worker: Any
    model_config: Any
    tp_group: Any


class NgramWorker(Protocol):
    """What makes and verifies SGLang's own n-gram drafts."""

    draft_token_num: int
