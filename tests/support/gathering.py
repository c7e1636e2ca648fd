"""What vLLM lacks on a CPU to share the experts of a layer among data-parallel ranks; tests only."""

from typing import Any


def add() -> None:
    """Gives the communicator of CPUs the two functions that gather and add up parts of unequal sizes.

    The engines that this process starts from now on have them in their workers, which are forked.
    """
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def sizes_of(communicator: Any, part: Any, sizes: list[int] | None) -> list[int]:
        return sizes or [len(part)] * communicator.world_size

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        sizes = sizes_of(self, input_, sizes)
        parts = [input_.new_zeros((max(sizes), *input_.shape[1:])) for _ in sizes]
        parts[self.rank_in_group][: len(input_)] = input_
        dist.all_gather(parts, parts[self.rank_in_group].clone(), group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        sizes = sizes_of(self, input_[: len(input_) // self.world_size], sizes)
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
