"""LUCIR: a unified classifier by rebalancing (Hou et al. 2019); with ``distill = geodesic`` the paper's best row."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from geodl.config import MANY, RunConfig, option, restate
from geodl.data.batches import Batch
from geodl.data.images import Images
from geodl.losses import margin_ranking
from geodl.methods.base import Losses, Method, Phase, Schedule, Stage, register
from geodl.nets import CosineHead, Output
from geodl.ranks import global_mean


class LucirConfig(RunConfig):
    """Options of LUCIR."""

    method: Literal["lucir"] = restate("method", "lucir")
    distill: str = restate("distill", "cosine")
    margin: float = option(0.5, "Method", "Margin m of the inter-class separation.", ge=0, in_model="kept")
    hard_classes: int = option(
        2, "Method", "New classes K that each old-class sample is kept away from.", ge=1, le=MANY, in_model="kept"
    )
    margin_weight: float = option(1.0, "Method", "Weight of the margin ranking loss.", ge=0, in_model="kept")
    finetune_epochs: int = option(
        0, "Method", "Epochs of class-balanced fine-tuning of the head.", ge=0, le=MANY, in_model="kept"
    )


@register
class Lucir(Method):
    """Cross-entropy on a cosine head + feature distillation + margin ranking (LUCIR Eq. 9)."""

    name = "lucir"
    title = "LUCIR"
    summary = "cosine head, imprinting, feature distillation, margin ranking; with --distill geodesic LUCIR + GeoDL"
    paper = "Hou, Pan, Loy, Wang, Lin: Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019"
    Config = LucirConfig
    base_loss = "cross-entropy"
    config: LucirConfig

    def losses(self, phase: Phase, batch: Batch, student: Output, teacher: Output | None, distill: Any) -> Losses:
        """Add the margin ranking on old-class samples (LUCIR Eq. 8) to cross-entropy and distillation."""
        parts = super().losses(phase, batch, student, teacher, distill)
        if phase.old and phase.new:
            head, config = phase.network.head, self.config
            assert isinstance(head, CosineHead)
            # The cosines before sigma, so that the margin means the same whatever the scale.
            cosines = head.cosines(student.pooled)
            hinges, counted = margin_ranking(cosines, batch.labels, phase.old, config.margin, config.hard_classes)
            parts["margin"] = config.margin_weight * global_mean(hinges, phase.ranks.group, counted)
        return parts

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Return the ordinary stage and, where asked for, class-balanced fine-tuning of the head (LUCIR Sec. 3.5)."""
        yield self.main_stage(phase)
        if phase.memory.images is not None and self.config.finetune_epochs:  # without old images there is no balance
            # As many images of every class: the exemplars, those of the new classes chosen now.
            chosen = self.exemplars(phase, min(phase.memory.per_class().values())).images
            assert chosen is not None
            yield self._balanced(phase, chosen)

    def _balanced(self, phase: Phase, chosen: Images) -> Stage:
        head = phase.network.head
        head.thaw()

        def loss(module: nn.Module, batch: Batch) -> Losses:
            with torch.no_grad(), phase.autocast():
                z = phase.network.features(batch.images)
            return {"ce": self.cross_entropy(phase, module(z), batch.labels)}

        decay = self.config.weight_decay
        schedule = Schedule(self.config.finetune_epochs, 0.01, milestones=(0.5,), momentum=0.9, weight_decay=decay)
        return Stage("balance", head, phase.batches(chosen, "balance"), loss, schedule, training=False)
