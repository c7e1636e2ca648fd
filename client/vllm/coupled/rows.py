"""Samples and verifies the rows of a batch that have a seed.

The token of a request with a seed is argmax(log p + noise(seed, place)). p is the distribution that vLLM would have
sampled from, after temperature, top-k, top-p, penalties, bad words and grammar. A drafted token is accepted if it is
this token. Requests without a seed and greedy requests are not handled here. ../patches/sampling.py calls this from
vLLM.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from histospec.client.engines.alternatives import Step
from histospec.client.vllm.coupled import noise
from histospec.client.vllm.coupled.alternatives import Weighed, words
from histospec.client.vllm.coupled.places import Texts
from histospec.protocol.alternatives import groups_of

if TYPE_CHECKING:
    torch: Any
    Tensor = Any
else:
    import torch
    from torch import Tensor

REJECTED = -1  # vLLM's value for a missing token


class CoupledRows:
    """The rows with a seed of a batch that is being sampled."""

    def __init__(self, batch: Any, drafted: Sequence[int] | None, texts: Texts) -> None:
        """Collects the rows with a seed.

        Args:
            batch: vLLM's InputBatch.
            drafted: how many tokens were drafted for each of its rows; None: none.
            texts: the texts of its requests.
        """
        generators: Mapping[int, Any] = batch.generators
        self.rows = sorted(generators)
        self._seeds = [_signed(generators[row].initial_seed()) for row in self.rows]
        self._drafted = [drafted[row] if drafted else 0 for row in self.rows]
        self._places = texts.places(
            (batch.req_ids[row], batch.token_ids_cpu[row], int(batch.num_tokens_no_spec[row]), count)
            for row, count in zip(self.rows, self._drafted, strict=True)
        )
        self._words: list[Tensor] = []  # of the drafted tokens, and of the tokens after the drafts

    def choose(self, logits: Tensor) -> Tensor:
        """Returns the tokens after the drafts, int64[rows]; logits are float32[batch, V], one row per request."""
        pairs, times = ([numbers[-1] for numbers in each] for each in zip(*self._places, strict=True))
        weighed = _weigh(logits, self.rows, self._seeds, pairs, times)
        self._words.append(words(weighed))
        return weighed.tokens

    def verify(self, logits: Tensor, drafts: Tensor, starts: Sequence[int], behind: Tensor, output: Tensor) -> None:
        """Verifies the drafts of the coupled rows, and writes the result to `output`.

        Args:
            logits: float32[drafted, V], flat over the requests.
            drafts: int[drafted], the drafted tokens.
            starts: the index of each request's first drafted token.
            behind: int[batch, 1], the token after each draft.
            output: int[batch, longest + 1], overwritten in the coupled rows: the tokens up to the first that differs
                from its draft, or up to the token after the draft; then REJECTED.
        """
        drawn = [(i, j) for i, drafted in enumerate(self._drafted) for j in range(drafted)]
        flat = [starts[self.rows[i]] + j for i, j in drawn]
        device = output.device
        pairs, times = ([self._places[i][what][j] for i, j in drawn] for what in (0, 1))
        weighed = _weigh(logits, flat, [self._seeds[i] for i, _ in drawn], pairs, times)
        self._words.insert(0, words(weighed))
        chosen = weighed.tokens
        rows, within = torch.tensor(drawn, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        counts = torch.tensor(self._drafted, device=device)
        coupled = torch.tensor(self.rows, device=device)
        tokens = output.new_full((len(self.rows), output.shape[1]), REJECTED)
        tokens[rows, within] = chosen.to(output.dtype)
        tokens[torch.arange(len(self.rows), device=device), counts] = behind[coupled, 0].to(output.dtype)
        differs = chosen != drafts[torch.tensor(flat, dtype=torch.int64, device=device)]
        first = counts.scatter_reduce(0, rows, torch.where(differs, within, counts[rows]), "amin")
        kept = torch.arange(output.shape[1], device=device) <= first[:, None]
        output[coupled] = torch.where(kept, tokens, REJECTED)

    def alternatives(self, requests: Sequence[str], sampled: Sequence[Sequence[int]]) -> dict[str, Step]:
        """Returns the alternatives of the coupled rows, after `choose` and `verify`.

        Args:
            requests: the id of each row of the batch.
            sampled: the tokens that each row got: accepted drafted tokens, and the one after them.
        """
        flat: list[int] = []
        kept = []
        first, behind = 0, sum(self._drafted)
        for i, (row, drafted) in enumerate(zip(self.rows, self._drafted, strict=True)):
            kept.append(len(sampled[row]))
            flat += range(first, first + min(drafted, kept[-1]))
            flat += [behind + i] * (kept[-1] > drafted)
            first += drafted
        drawn = torch.cat(self._words).cpu().numpy()[flat]
        counts, groups = groups_of(drawn[:, 0].astype(np.uint8), drawn[:, 1:].astype(np.uint32))
        ends = np.concatenate([[0], np.cumsum(np.where(counts, 1 + 4 * counts.astype(np.int64), 0))])
        found, at = {}, 0
        for row, tokens in zip(self.rows, kept, strict=True):
            found[requests[row]] = Step(counts[at : at + tokens].tobytes(), groups[ends[at] : ends[at + tokens]])
            at += tokens
        return found


def _signed(seed: int) -> int:
    """Returns the same 64 bits as a signed integer, for torch's int64."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _weigh(logits: Tensor, *numbers: Sequence[int]) -> Weighed:
    arguments = torch.tensor(numbers, dtype=torch.int64).to(logits.device, non_blocking=True)
    implementation: Any = noise
    if logits.is_cuda:
        implementation = importlib.import_module(".kernel", __package__)
    weighed: Weighed = implementation.weigh(logits, *arguments.unbind())
    return weighed
