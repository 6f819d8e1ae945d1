"""Learning in closed form: a backbone that is trained once, or never, and ridge regression for every phase (ACIL, RanPAC)."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, distributed

from geodl.closed_form import (
    Blocks,
    Expansion,
    Fitted,
    Standardization,
    Statistics,
    share_out,
    targets_of,
    temperature,
)
from geodl.config import RunConfig, derive, option, restate
from geodl.methods.base import Method, Phase, register
from geodl.nets import Network

CHUNK = 2048
"""Images that are expanded at a time."""
JUDGED = 512
"""Images of a phase whose leave-one-out scores fit the temperature."""


class AnalyticConfig(RunConfig):
    """Options of learning in closed form."""

    method: Literal["analytic"] = restate("method", "analytic")
    distill: Literal["none"] = restate("distill", "none")
    exemplars: int = option(
        0,
        "Memory",
        "Exemplars to keep all the same, for k-NME; the method needs none.",
        ge=0,
        in_model="kept",
        in_grid=True,
    )
    gamma: float = option(0.01, "Method", "Ridge: lambda = gamma x the mean square of a random feature.", gt=0)
    expansion: int = option(
        4096, "Method", "Random features in all, shared out by the widths of the levels.", ge=1, le=65536
    )
    levels: tuple[str, ...] | None = option(None, "Method", "Levels of the network that are read; unset: all.")
    mirror: bool = option(True, "Method", "Average the scores of test images and their mirrored copies (needs flip).")
    train_base: bool | None = option(
        None, "Method", "Train the backbone in phase 0; unset: unless it comes with weights."
    )


@register
class Analytic(Method):
    """head = (G + lambda I)^-1 C over random features of a frozen network: the same whatever the cut into phases."""

    name = "analytic"
    summary = "closed form: the backbone is trained in phase 0 alone, every phase is one linear system; no exemplars"
    paper = (
        "Zhuang et al.: ACIL, NeurIPS 2022; McDonnell et al.: RanPAC, NeurIPS 2023 (several levels of features: ours)"
    )
    Config = AnalyticConfig
    base_loss = "cross-entropy"
    config: AnalyticConfig

    def trains(self, phase: int) -> bool:
        """Return whether the backbone moves: in phase 0 alone, and not where it comes with weights."""
        given = self.config.pretrained or self.config.weights is not None
        return phase == 0 and (not given if self.config.train_base is None else self.config.train_base)

    @property
    def mirrors(self) -> bool:
        """Whether scores are averaged over mirrored test images."""
        return self.config.mirror and self.config.flip

    def levels(self, network: Network) -> tuple[str, ...]:
        """Return the levels that are read."""
        return self.config.levels or network.level_names

    def keep(self, phase: Phase) -> dict[str, Tensor]:
        """Add the phase's images to the statistics, each rank its share, and solve; return both, and the temperature."""
        assert phase.settled is not None
        # Without the exemplars of a class that comes back: they were counted when they were new.
        count, classes = len(phase.images), phase.old + phase.new
        labels = phase.settled.labels[:count]
        z = {name: rows[:count] for name, rows in phase.settled.levels.items()}
        before = phase.memory.own
        # That of phase 0 for good: what was standardized otherwise is no longer there to be standardized again.
        standardization = Standardization.from_tensors(before) if before else Standardization.of(z)
        expansion = self._expansion(z)

        def expanded(rows: Tensor) -> Tensor:
            return expansion(standardization({name: block[rows] for name, block in z.items()}))

        added = Statistics.empty(expansion.width, classes)
        share = torch.arange(phase.ranks.rank, count, phase.ranks.world)
        for rows in torch.split(share, CHUNK):
            added.add(expanded(rows), labels[rows], classes)
        if phase.ranks.group is not None:
            for part in (added.upper, added.sums, added.counts):
                distributed.all_reduce(part, group=phase.ranks.group)
        statistics = (Statistics.from_tensors(before) + added if before else added).rounded()
        solved = statistics.solve(self.config.gamma)
        some = torch.arange(0, count, max(1, count // JUDGED))
        judged = solved.leave_one_out(expanded(some), targets_of(labels[some], classes))
        heat = temperature(judged, labels[some])
        return statistics.to_tensors() | Fitted(standardization, expansion, solved.head.float(), heat).to_tensors()

    def fitted(self, kept: Mapping[str, Tensor]) -> Fitted | None:
        """Return the head that was solved last."""
        return Fitted.from_tensors(kept, self._seed) if kept else None

    def without(self, kept: Mapping[str, Tensor], gone: int) -> dict[str, Tensor]:
        """Return what is kept, without a class; G still holds its images, which are then of no class."""
        fitted = self.fitted(kept)
        if fitted is None:
            return {}
        statistics = Statistics.from_tensors(kept).without([gone]) if "gram" in kept else None
        return fitted.without(gone).to_tensors() | (statistics.to_tensors() if statistics else {})

    @property
    def _seed(self) -> int:
        return derive(self.config.seed, "expansion")

    def _expansion(self, z: Blocks) -> Expansion:
        widths = {name: z[name].shape[1] for name in sorted(z)}
        return Expansion(share_out(self.config.expansion, widths), self._seed)
