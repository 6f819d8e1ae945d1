"""Random features h of images from their features z, and sums of them over many images."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geodl.closed_form.expansion import Blocks, Expansion, Standardization, selected, share_out
from geodl.closed_form.primal import Statistics
from geodl.core.ranks import Ranks

CHUNK = 2048
"""Images expanded at a time."""


@dataclass(frozen=True)
class RandomFeatures:
    """h = ReLU(W z) of standardized z, block by block."""

    standardization: Standardization
    expansion: Expansion

    @classmethod
    def of(cls, z: Blocks, width: int, seed: int) -> RandomFeatures:
        """Return `width` random features for z: (N, d_b) by block, divided in proportion to the blocks' widths."""
        widths = {name: z[name].shape[1] for name in sorted(z)}
        return cls(Standardization.of(z), Expansion(share_out(width, widths), seed))

    def of_blocks(self, names: Collection[str]) -> RandomFeatures:
        """Return the random features of some of the blocks."""
        mean, scale = self.standardization.mean, self.standardization.scale
        measured = Standardization(
            {name: mean[name] for name in names}, {name: scale[name] for name in names}
        )
        sizes = {name: self.expansion.sizes[name] for name in sorted(names)}
        return RandomFeatures(measured, Expansion(sizes, self.expansion.seed))

    def __call__(self, *views: Blocks) -> Tensor:
        """Return h (n, M) of images, the mean over their views: the head is linear, so scores are averaged, too."""
        expanded = []
        for view in views:
            z = {name: view[name] for name in self.expansion.sizes}
            expanded.append(self.expansion(self.standardization(z)))
        return expanded[0] if len(expanded) == 1 else torch.stack(expanded).mean(0)

    def sums(
        self,
        views: Sequence[Blocks],
        labels: Tensor,
        classes: int,
        ranks: Ranks = Ranks(),  # noqa: B008  # frozen
        device: torch.device | str = "cpu",
    ) -> Statistics:
        """Return the sums over all images; each rank computes its share."""
        statistics = Statistics.empty(self.expansion.width, classes)
        for rows in torch.split(torch.arange(ranks.rank, len(labels), ranks.world), CHUNK):
            some = [selected(view, rows) for view in views]
            statistics.add(self(*some), labels[rows], classes)
        parts = (statistics.upper, statistics.sums, statistics.counts)
        return Statistics(*(ranks.add_up(part, device) for part in parts))
