"""Data-parallel ranks of a mixture of experts on a CPU, for which vLLM lacks the two collectives of its experts.

A worker that imports this gets them: `worker_extension_cls` is `tests.support.data_parallel.Collectives`.
"""

from typing import Any

import torch
from torch.distributed import all_gather, all_reduce
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Collectives:
    """What vLLM adds to the methods of a worker: none."""


def _all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Returns the tensors of all ranks, one behind the other, [sum(sizes), ...]; of a list, each so."""
    if isinstance(given, list):
        return [_all_gatherv(self, each, dim, sizes) for each in given]
    assert dim == 0
    sizes = sizes or [len(given)] * self.world_size
    padded = given.new_zeros((max(sizes), *given.shape[1:]))  # gloo gathers tensors of one size
    padded[: len(given)] = given
    gathered = [torch.empty_like(padded) for _ in sizes]
    all_gather(gathered, padded, group=self.device_group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(self: Any, given: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Returns this rank's rows of the sum of all ranks' tensors, [sizes[rank], ...]."""
    assert dim == 0
    total = given.clone()
    all_reduce(total, group=self.device_group)
    return total.split(sizes or len(total) // self.world_size)[self.rank_in_group]


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
