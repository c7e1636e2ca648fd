"""Lets vLLM's model runner V2 verify the scheduler's drafts.

V1 takes drafts as lists with each step. V2 keeps them in a tensor on the device, `req_states.draft_tokens` (int64,
[max_num_seqs, num_speculative_tokens]), which its speculator fills, and takes only their numbers from the scheduler.
With HistoSpec, the numbers and the drafts are the scheduler's, as with V1:

    schedule ─► scheduled_spec_decode_tokens ─► update_requests: copied to draft_tokens ─► forward, sample
                       ▲                                                                        │
    update_draft_token_ids ◄── take_draft_token_ids: an empty draft for each request ◄──────────┘

Under asynchronous scheduling the numbers are those of places that the scheduler has reserved, and the workers'
speculator has the drafts (`asynchronous/speculator.py`). At the same point, in `update_requests`, the places that no
draft fills are removed from the worker's copy of the step. The scheduler counts them as rejected, with the outcome.

The copies are asynchronous: nothing here waits for the device.
"""

import copy
import dataclasses
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from histospec.client.vllm import settings
from histospec.client.vllm.asynchronous.speculator import Speculator
from histospec.client.vllm.patches.replacing import attach, is_replaced, replace

if TYPE_CHECKING:  # type checkers would take minutes for torch and vLLM
    from histospec.client.vllm.interface import SchedulerOutput

    torch: Any
    Tensor = Any
    BaseSpeculator = object
else:
    import torch
    from torch import Tensor
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

MODULE = "vllm.v1.worker.gpu.model_runner"


def install() -> None:
    """Replaces five functions of V2's model runner, at most once per process."""
    module: Any = importlib.import_module(MODULE)
    runner = module.GPUModelRunner
    if is_replaced(module, "init_speculator"):
        return
    replace(module, "init_speculator", _speculator(module.init_speculator))
    replace(runner, "execute_model", _executing(runner.execute_model))
    replace(runner, "update_requests", _copying(runner.update_requests))
    replace(runner, "sample_tokens", _hearing(runner.sample_tokens))
    replace(runner, "take_draft_token_ids", _taking(runner.take_draft_token_ids))


def _speculator(init_speculator: Any) -> Any:
    """Returns `init_speculator` that makes HistoSpec's speculators for its method."""

    @functools.wraps(init_speculator)
    def make(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not settings.proposes(vllm_config):
            return init_speculator(vllm_config, device, req_states)
        if vllm_config.scheduler_config.async_scheduling:
            return Speculator(vllm_config)
        return NoSpeculator(vllm_config.speculative_config.num_speculative_tokens)

    return make


def _speculator_of(runner: Any) -> Speculator | None:
    """Returns the speculator of asynchronous scheduling; None if another one drafts."""
    return runner.speculator if isinstance(runner.speculator, Speculator) else None


class NoSpeculator(BaseSpeculator):
    """The drafter of V2's workers under synchronous scheduling. It drafts nothing, because the scheduler does."""

    supports_mm_inputs = False
    draft_logits = None  # the drafts are tokens, without a distribution

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Does nothing: there is no model."""

    def capture(self) -> None:
        """Does nothing: there is no model."""

    def propose(self, input_batch: Any, *args: Any, **named: Any) -> Tensor:
        """Returns int64[requests, tokens]. Nothing reads it: update_requests writes each place that is scheduled."""
        rows = input_batch.idx_mapping
        return torch.zeros((len(rows), self.tokens), dtype=torch.int64, device=rows.device)


def _executing(execute_model: Any) -> Any:
    """Returns `execute_model` that gives a speculator a copy of the step to change; the scheduler may have the same."""

    @functools.wraps(execute_model)
    def execute(self: Any, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        if _speculator_of(self) is not None:
            scheduler_output = copy.copy(scheduler_output)
        return execute_model(self, scheduler_output, *args, **named)

    return execute


def _copying(update_requests: Any) -> Any:
    """Returns `update_requests` that also copies the step's drafts to the device."""

    @functools.wraps(update_requests)
    def update(self: Any, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        updated = update_requests(self, scheduler_output, *args, **named)
        if (speculator := _speculator_of(self)) is not None:
            verify(scheduler_output, speculator.begin(scheduler_output))
        elif not isinstance(self.speculator, NoSpeculator):
            return updated
        if drafts := scheduler_output.scheduled_spec_decode_tokens:
            put(
                self.req_states.draft_tokens,
                [self.req_states.req_id_to_index[each] for each in drafts],
                drafts.values(),
            )
        return updated

    return update


def verify(step: "SchedulerOutput", drafts: Mapping[str, list[int]]) -> None:
    """Gives a worker's SchedulerOutput these drafts, and removes the places that they do not fill.

    Args:
        step: with the places of each request; it is changed.
        drafts: at most as long as the places of their requests, and not empty.
    """
    unfilled = {
        request: len(places) - len(drafts.get(request, ()))
        for request, places in step.scheduled_spec_decode_tokens.items()
    }
    tokens = {request: number - unfilled.get(request, 0) for request, number in step.num_scheduled_tokens.items()}
    attach(step, "scheduled_spec_decode_tokens", drafts)
    attach(step, "num_scheduled_tokens", tokens)
    attach(step, "total_num_scheduled_tokens", step.total_num_scheduled_tokens - sum(unfilled.values()))


def put(draft_tokens: Tensor, rows: Sequence[int], drafts: Iterable[Sequence[int]]) -> None:
    """Copies drafts to their rows on the device, without a wait.

    Args:
        draft_tokens: int64[max_num_seqs, tokens], on the device.
        rows: the row of each draft.
        drafts: their tokens, at most as many as a row has. The rest of a row is the draft's last token.
    """
    lengths = draft_tokens.shape[1]
    packed = [[row, *draft, *draft[-1:] * (lengths - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
    # One copy for rows and tokens. From pinned memory it does not wait for the device.
    moved = torch.tensor(packed, dtype=torch.int64, pin_memory=draft_tokens.is_cuda)
    moved = moved.to(draft_tokens.device, non_blocking=True)
    draft_tokens.index_copy_(0, moved[:, 0], moved[:, 1:])


def _hearing(sample_tokens: Any) -> Any:
    """Returns `sample_tokens` whose outcome the speculator gets, to ask for drafts when its tokens are on the host."""

    @functools.wraps(sample_tokens)
    def sample(self: Any, *args: Any, **named: Any) -> Any:
        output = sample_tokens(self, *args, **named)
        if output is not None and (speculator := _speculator_of(self)) is not None:
            speculator.sampled(output)
        return output

    return sample


def _taking(take_draft_token_ids: Any) -> Any:
    """Returns `take_draft_token_ids` that gives an empty draft for each request; vLLM's has placeholders, -1."""

    @functools.wraps(take_draft_token_ids)
    def take(self: Any) -> Any:
        taken = take_draft_token_ids(self)
        if taken is None or not isinstance(self.speculator, NoSpeculator):
            return taken
        return dataclasses.replace(taken, draft_token_ids=[[] for _ in taken.req_ids])

    return take
