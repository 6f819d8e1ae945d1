"""Collective operations of the processes that train together: R ranks compute what one would."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes that train together."""

    rank: int = 0
    world: int = 1

    @property
    def group(self) -> Group:
        """The group of all processes; None for a single one. Not stored: its threads live as long as a reference."""
        return dist.group.WORLD if self.world > 1 else None

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def any(self, flag: bool, device: torch.device | str = "cpu") -> bool:
        """Return whether the flag is set on any rank: signals and clocks differ between ranks, decisions must not."""
        if self.group is None:
            return flag
        flags = torch.tensor(float(flag), device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        return bool(flags.item())

    def add_up(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """Return the sum of a tensor over all ranks, computed on `device`: NCCL cannot sum tensors on the CPU."""
        if self.group is None:
            return tensor
        total = tensor.to(device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(self.group)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors, such as the buffers of a module, with those of the first rank."""
        if self.group is not None:
            for tensor in tensors:
                dist.broadcast(tensor, dist.get_global_rank(self.group, 0), self.group)


def global_mean(values: Tensor, group: Group = None, where: Tensor | None = None) -> Tensor:
    """Return the mean over the elements of `values` on all ranks of the group; 0 without elements.

    where: bool, broadcast to the shape of `values`; selects the elements.
    Every rank gets the global value. Its gradient is world size x its own part, so that the mean over ranks is the gradient.
    """
    if where is None:
        total = values.sum()
        count = torch.full_like(total, values.numel(), dtype=torch.float64)
    else:
        total = torch.where(where, values, 0.0).sum()
        count = where.expand_as(values).sum(dtype=torch.float64)
    if group is None:
        return total / count.clamp(min=1.0).to(total.dtype)
    sums = torch.stack([total.detach().double(), count])
    dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[1].clamp(min=1.0)
    own = total * (dist.get_world_size(group) / sums[1].clamp(min=1.0)).to(total.dtype)
    return mean.to(total.dtype) + (own - own.detach())


def gather_rows(z: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return z: (batch, ...) of all ranks, concatenated and without gradient, and the position of this rank's first row.

    Batches may differ in size.
    """
    if group is None:
        return z.detach(), 0
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=z.device)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([len(z)], device=z.device), group=group)
    counts = [int(size) for size in sizes]
    padded = z.new_zeros(max(counts), *z.shape[1:])  # all_gather needs equal shapes
    padded[: len(z)] = z.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    start = sum(counts[: dist.get_rank(group)])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), start
