"""What several processes that train together share: means, rows, decisions. Alone, everything here is free."""

from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

Group = ProcessGroup | None


@dataclass(frozen=True)
class Ranks:
    """Our place among the processes that train together; ``group`` is None where we are alone."""

    rank: int = 0
    world: int = 1
    group: Group = None

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.rank == 0

    def any(self, mine: bool, device: torch.device | str = "cpu") -> bool:
        """Whether any rank says so: signals and clocks differ between ranks, what they do must not."""
        if self.group is None:
            return mine
        flag = torch.tensor(float(mine), device=device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, self.group)
        return bool(flag.item())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            distributed.barrier(self.group)

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the first rank's buffers (batch statistics) to every rank: each has gathered its own."""
        if self.group is not None:
            for buffer in module.buffers():
                distributed.broadcast(buffer, 0, self.group)


def global_mean(values: Tensor, group: Group = None) -> Tensor:
    """Return the mean over all elements of ``values`` on all ranks of the group; 0 where there is none anywhere.

    Every rank gets the global value; its gradient is world size x its own part, so that the mean over ranks (what
    data-parallel training takes) is the gradient.
    """
    total = values.sum()
    if group is None:
        return total / max(values.numel(), 1)
    sums = torch.stack([total.detach().double(), total.new_tensor(values.numel(), dtype=torch.float64)])
    distributed.all_reduce(sums, group=group)
    count = sums[1].clamp(min=1.0)
    own = total * (distributed.get_world_size(group) / count).to(total.dtype)
    return (sums[0] / count).to(total.dtype) + (own - own.detach())


def gather_rows(z: Tensor, group: Group = None) -> tuple[Tensor, int]:
    """Return the rows of all ranks of z: (batch, ...), without gradient, and where this rank's begin.

    Batches may differ in size from rank to rank.
    """
    if group is None:
        return z.detach(), 0
    sizes = [torch.zeros(1, dtype=torch.int64, device=z.device) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, torch.tensor([len(z)], device=z.device), group=group)
    counts = [int(size) for size in sizes]
    padded = z.new_zeros(max(counts), *z.shape[1:])  # collectives want equal shapes
    padded[: len(z)] = z.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=group)
    start = sum(counts[: distributed.get_rank(group)])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), start
