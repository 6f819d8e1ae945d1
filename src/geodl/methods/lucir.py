"""LUCIR: a unified classifier by rebalancing (Hou et al. 2019); with ``distill = geodesic`` the paper's best method."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from geodl.config import MANY, Options
from geodl.data.batches import Batch
from geodl.data.images import Images
from geodl.losses import margin_ranking
from geodl.methods.method import Losses, Method, Schedule, Stage, register
from geodl.model.phase import Phase
from geodl.nets import CosineHead, Output


class LucirOptions(Options):
    """Options of LUCIR."""

    defaults: ClassVar = {"distill": "cosine"}
    margin: float = Field(0.5, ge=0)
    """Margin m of the inter-class separation."""
    hard_classes: int = Field(2, ge=1, le=MANY)
    """The number K of new classes from which each old-class sample is separated."""
    margin_weight: float = Field(1.0, ge=0)
    """Weight of the margin ranking loss."""
    finetune_epochs: int = Field(0, ge=0, le=MANY)
    """Epochs of class-balanced fine-tuning of the head."""


@register
class Lucir(Method):
    """Cross-entropy on a cosine head + feature distillation + margin ranking (LUCIR Eq. 9)."""

    name = "lucir"
    title = "LUCIR"
    summary = "cosine head, imprinting, feature distillation, margin ranking; with --distill geodesic LUCIR + GeoDL"
    paper = "Hou, Pan, Loy, Wang, Lin: Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019"
    Options = LucirOptions
    base_loss = "cross-entropy"
    options: LucirOptions

    def loss(self, phase: Phase, batch: Batch, student: Output, teacher: Output | None) -> Losses:
        """Yield cross-entropy, distillation, and the margin ranking of old-class samples (Eq. 8)."""
        yield from super().loss(phase, batch, student, teacher)
        if phase.old and phase.new:
            head, options = phase.network.head, self.options
            assert isinstance(head, CosineHead)
            # The cosines before sigma, so that the margin means the same whatever the scale.
            cosines = head.cosines(student.pooled)
            hinges = margin_ranking(
                cosines, batch.labels, phase.old, options.margin, options.hard_classes
            )
            yield "margin", options.margin_weight * phase.mean(*hinges)

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Yield the ordinary stage and, if enabled, class-balanced fine-tuning of the head (LUCIR Sec. 3.5)."""
        yield self.main_stage(phase)
        if phase.memory.images is not None and self.options.finetune_epochs:
            # The same number of images of every class: the exemplars, with those of the new classes selected now.
            balanced = phase.exemplars(min(phase.memory.per_class().values())).images
            assert balanced is not None
            yield self._balanced_stage(phase, balanced)

    def _balanced_stage(self, phase: Phase, images: Images) -> Stage:
        head = phase.network.head
        head.thaw()

        def loss(module: nn.Module, batch: Batch) -> Losses:
            with torch.no_grad(), phase.autocast():
                z = phase.network.features(batch.images)
            yield "ce", phase.cross_entropy(module(z), batch.labels)

        decay = self.config.weight_decay
        epochs, batches = self.options.finetune_epochs, phase.batches(images, "balance")
        schedule = Schedule(epochs, 0.01, milestones=(0.5,), weight_decay=decay)
        return Stage("balance", head, batches, loss, schedule, training=False)
