"""The speculator of V2's workers under asynchronous scheduling: fills the places that the scheduler has reserved.

`propose` only launches: each place gets the last sampled token. A place is an input of the model, so it must hold a
token, also if no draft arrives. At the start of the next step, rank 0 of the tensor-parallel group asks the server
(`asking.py`) and writes the drafts over them; the other ranks get the drafts in a broadcast that no host waits for.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from histospec.client import DraftClient
from histospec.client.vllm.asynchronous.asking import Asking, Begun
from histospec.client.vllm.asynchronous.messages import Answers, Order, order_of, put_answers

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

NO_TOKEN = -1  # in a broadcast: leave the place as it is


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
        """Returns int64[requests, tokens]: the last sampled token in every place."""
        return last_sampled.view(-1)[input_batch.idx_mapping].unsqueeze(1).repeat(1, self._tokens)

    def begin(self, states: Any, scheduler_output: Any) -> None:
        """Fills the places of a step before its forward pass.

        Args:
            states: V2's `req_states`.
            scheduler_output: what the scheduler has sent for the step.
        """
        given = scheduler_output.scheduled_spec_decode_tokens
        places = {request: len(given[request]) for request in given}
        drafts: Mapping[str, Sequence[int]] = {}
        if self._asking is not None:
            drafts = self._ask(self._asking, scheduler_output, places)
        if not places:
            return
        rows = [[states.req_id_to_index[each]] for each in places]
        if self._group.world_size == 1:
            rows = [[*row, *drafts[each]] for row, each in zip(rows, places, strict=True) if each in drafts]
            if not rows:
                return
        else:  # each rank has the same rows
            rows = [[*row, *drafts.get(each, ())] for row, each in zip(rows, places, strict=True)]
        moved = moving([row + [NO_TOKEN] * (1 + self._tokens - len(row)) for row in rows], states.draft_tokens)
        if self._group.world_size > 1:
            moved = self._group.broadcast(moved, src=0)
        fill(states.draft_tokens, moved)

    def sampled(self, output: Any) -> None:
        """Takes the outcome of a step, an AsyncOutput whose copies to the host have begun."""
        if self._asking is None:
            return
        self._answers, self._newest = self._newest, []
        put_answers(output.model_runner_output, self._answers)
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
                begun.append(Begun(new.req_id, text, len(text) - new.prompt_len, order.begun[new.req_id]))
        if order is None:  # the scheduler failed, and says so in the log
            order = Order(0, None, drafts=False, looks=False, begun={})
        drafts, answers = asking.step(order.step, ended, begun, places, order.verify_cost, order.looks)
        self._answers += answers  # in time if vLLM has not passed the outcome of the step before on;
        self._newest += answers  # otherwise they go with this step's
        return {request: draft.tokens.tolist() for request, draft in drafts.items()}


def tokens_of(output: Any) -> list[Sequence[int]]:
    """Waits for the copies of an AsyncOutput. Returns the sampled tokens of each request."""
    output.copy_event.synchronize()
    counts: list[int] = output.num_sampled_tokens_np.tolist()
    sampled: list[list[int]] = output.sampled_token_ids.tolist()
    return [tokens[:count] for tokens, count in zip(sampled, counts, strict=True)]


def moving(rows: list[list[int]], like: Tensor) -> Tensor:
    """Returns the rows on the device of another tensor. From pinned memory the copy does not wait for the device."""
    moved: Tensor = torch.tensor(rows, dtype=torch.int64, pin_memory=like.is_cuda)
    return moved.to(like.device, non_blocking=True)


def fill(draft_tokens: Tensor, moved: Tensor) -> None:
    """Writes drafts into their rows on the device, without a wait.

    Args:
        draft_tokens: int64[max_num_seqs, tokens].
        moved: int64[drafts, 1 + tokens]: the row of each draft, then its tokens and NO_TOKEN where there is none.
    """
    rows, drafts = moved[:, 0], moved[:, 1:]
    draft_tokens[rows] = torch.where(drafts == NO_TOKEN, draft_tokens[rows], drafts)
