"""The speculator of V2's workers under asynchronous scheduling: says which drafts a step verifies.

`propose` only launches, and drafts nothing. At the start of the next step, rank 0 of the tensor-parallel group asks the
server (`asking.py`) and sends the drafts to the other ranks. `patches/runner_v2.py` then removes the places that no
draft fills from the step, so the device computes no more tokens than with synchronous scheduling.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from histospec.client import DraftClient
from histospec.client.vllm.asynchronous.asking import Asking, Begun
from histospec.client.vllm.asynchronous.messages import Answers, Order, Outcome, order_of, put_outcome
from histospec.protocol.costs import DEFAULT_VERIFY_COST

if TYPE_CHECKING:  # type checkers would take minutes for torch and vLLM
    torch: Any
    Tensor = Any
    BaseSpeculator = object
    get_tp_group: Any
else:
    import torch
    from torch import Tensor
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator


class Speculator(BaseSpeculator):
    """One per worker."""

    supports_mm_inputs = False
    draft_logits = None  # the drafts are tokens, without a distribution

    def __init__(self, vllm_config: Any) -> None:
        self._tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._asking: Asking | None = None
        self._answers: list[Answers] = []  # on the newest outcome, which vLLM may have passed on
        self._newest: list[Answers] = []  # those since that outcome
        self._verified: dict[str, int] = {}  # tokens that the newest step verifies
        self._group = get_tp_group()
        if self._group.rank_in_group == 0:
            self._asking = self._connect()

    def _connect(self) -> Asking:
        return Asking(DraftClient(), self._tokens, self._vocabulary)

    def reconnect(self) -> None:
        """Makes a client as the environment says now, in place of the one before."""
        if self._asking is not None:
            self._asking.shut_down()
            self._asking = self._connect()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Does nothing: there is no model."""

    def capture(self) -> None:
        """Does nothing: there is no model."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Tensor,
        *args: Any,
        **named: Any,
    ) -> Tensor:
        """Returns int64[requests, tokens]. Nothing reads it: each place that is verified holds a draft."""
        rows = input_batch.idx_mapping
        return torch.zeros((len(rows), self._tokens), dtype=torch.int64, device=rows.device)

    def begin(self, scheduler_output: Any) -> dict[str, list[int]]:
        """Returns the drafts that a step verifies, by request, before its forward pass; the same on each rank.

        Args:
            scheduler_output: what the scheduler has sent for the step.
        """
        given = scheduler_output.scheduled_spec_decode_tokens
        places = {request: len(given[request]) for request in given}
        drafts: dict[str, list[int]] = {}
        if self._asking is not None:
            drafts = self._ask(self._asking, scheduler_output, places)
        if places and self._group.world_size > 1:
            drafts = self._group.broadcast_object(drafts, src=0)
        self._verified = {request: len(draft) for request, draft in drafts.items()}
        return drafts

    def sampled(self, output: Any) -> None:
        """Takes the outcome of a step, an AsyncOutput whose copies to the host have begun."""
        if self._asking is None:
            return
        self._answers, self._newest = self._newest, []
        put_outcome(output.model_runner_output, Outcome(self._verified, self._answers))
        self._asking.sampled(output.model_runner_output.req_ids, lambda: tokens_of(output))

    def shut_down(self) -> None:
        """Ends the client."""
        if self._asking is not None:
            self._asking.shut_down()

    def _ask(self, asking: Asking, scheduler_output: Any, places: Mapping[str, int]) -> dict[str, list[int]]:
        order = order_of(scheduler_output)
        ended = {*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())}
        begun: list[Begun] = []
        for new in scheduler_output.scheduled_new_reqs:
            if order is not None and new.req_id in order.begun:
                text = list(new.prefill_token_ids)  # the scheduler's own list, which grows
                begun.append(Begun(new.req_id, text, len(text) - new.prompt_len, *order.begun[new.req_id]))
        if order is None:  # the scheduler failed, and says so in the log
            order = Order(0, None, drafts=False, value=DEFAULT_VERIFY_COST, begun={})
        drafts, answers = asking.step(order.step, ended, begun, places, order.verify_cost, order.value)
        self._answers += answers  # in time if vLLM has not passed the outcome of the step before on;
        self._newest += answers  # otherwise they go with this step's
        return {request: draft.tokens.tolist() for request, draft in drafts.items()}


def tokens_of(output: Any) -> list[Sequence[int]]:
    """Waits for the copies of an AsyncOutput. Returns the sampled tokens of each request."""
    output.copy_event.synchronize()
    counts: list[int] = output.num_sampled_tokens_np.tolist()
    sampled: list[list[int]] = output.sampled_token_ids.tolist()
    return [tokens[:count] for tokens, count in zip(sampled, counts, strict=True)]
