"""BiC: two numbers per phase correct the bias towards the newest classes (Wu et al. 2019)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from geodl.config import MANY, Options
from geodl.data.batches import Batch, Batches, Transform
from geodl.data.images import ArrayImages, Images
from geodl.methods.method import Losses, Method, Schedule, Stage, register
from geodl.model.phase import Phase
from geodl.nets import Output


class BicOptions(Options):
    """Options of BiC."""

    defaults: ClassVar = {"distill": "lwf"}
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of a class's exemplars held out for the correction."""
    correction_epochs: int = Field(200, ge=0, le=MANY)
    """Epochs of the bias correction; 0: no correction."""
    correction_lr: float = Field(0.1, gt=0)
    """Learning rate of the bias correction."""
    correction_l2: float = Field(0.1, ge=0)
    """Weight of (alpha - 1)^2 in the bias correction."""


@register
class Bic(Method):
    """Weighted cross-entropy and distillation; then the new classes' logits become alpha * logit + beta; linear head."""

    name = "bic"
    title = "BiC"
    summary = "as lwf with weights by class counts, then a bias correction of the new classes' logits on held-out images"
    paper = "Wu, Chen, Wang, Ye, Liu, Guo, Fu: Large Scale Incremental Learning, CVPR 2019"
    Options = BicOptions
    head = "linear"
    base_loss = "cross-entropy"
    options: BicOptions

    def held_out(self, quota: int) -> int:
        """Return a tenth of the quota, at least one; 0 if that would leave nothing to train on."""
        return max(1, round(self.options.held_out * quota)) if quota >= 2 else 0

    def loss(self, phase: Phase, batch: Batch, student: Output, teacher: Output | None) -> Losses:
        """Yield (1 - lambda) L_ce and lambda L_d with lambda = old / (old + new) (BiC Eq. 1)."""
        ce = phase.cross_entropy(student.logits, batch.labels)
        distilled = phase.distill(student, teacher)
        if distilled is None:
            yield "ce", ce
            return
        # max: if all classes are returning ones, their rows still learn.
        share = phase.old / (phase.old + max(phase.new, 1))
        yield "ce", (1 - share) * ce
        yield "distill", share * distilled

    def stages(self, phase: Phase) -> Iterator[Stage]:
        """Yield the ordinary stage, then the correction, which needs held-out images of old and of new classes."""
        yield self.main_stage(phase)
        held = phase.memory.held
        if held is not None and self.options.correction_epochs:
            new = held.labels >= phase.old
            if new.any() and not new.all():
                yield self._correction(phase, held)

    def _correction(self, phase: Phase, held: Images) -> Stage:
        """Fit alpha and beta of the newest classes on the held-out images, the network frozen in eval mode (Sec. 3.3).

        The logits are computed once, since the network is fixed and the images are not augmented.
        """
        old, head = phase.old, phase.network.head
        with torch.no_grad():
            features = phase.read(held).pooled.to(phase.device)
            # Old classes keep their earlier pairs; logits of new classes are not corrected yet.
            logits = torch.cat([head(features)[:, :old], head.raw(features)[:, old:]], dim=1)
        correction = Correction(old)

        def loss(module: nn.Module, batch: Batch) -> Losses:
            corrected = module(logits[batch.indices.to(phase.device)])
            # In the paper the L2 is on alpha; on alpha - 1, it leaves unbiased logits unchanged.
            l2 = self.options.correction_l2 * (correction.alpha - 1).square()
            yield "ce", phase.cross_entropy(corrected, batch.labels)
            yield "l2", l2

        def finish() -> None:
            # In the head, so that classifiers, exports and the next phase's teacher use corrected logits.
            alpha, beta = correction.alpha.detach(), correction.beta.detach()
            head.correct(range(old, head.classes), alpha, beta)

        rate, epochs = self.options.correction_lr, self.options.correction_epochs
        schedule = Schedule(epochs, rate, milestones=(0.3, 0.6, 0.8, 0.9))
        batches = _places(phase, held)
        return Stage("correct", correction, batches, loss, schedule, training=False, finish=finish)


class Correction(nn.Module):
    """The two numbers: logits of classes from ``old`` on become alpha * logit + beta (BiC Eq. 5)."""

    def __init__(self, old: int) -> None:
        super().__init__()
        self.old = old
        self.alpha = nn.Parameter(torch.ones(()))
        self.beta = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor) -> Tensor:
        """Correct logits: (B, C)."""
        return torch.cat(
            [logits[:, : self.old], self.alpha * logits[:, self.old :] + self.beta], dim=1
        )


def _places(phase: Phase, held: Images) -> Batches:
    """Return batches of indices and labels: each image is replaced by a black pixel, so nothing is decoded."""
    blank = ArrayImages(torch.zeros(len(held), 3, 1, 1, dtype=torch.uint8), held.labels)
    still = Transform(1, phase.transform.mean, phase.transform.std, padding=0, flip=False)
    batch_size = max(phase.config.batch_size, phase.ranks.world)
    return replace(phase, transform=still).batches(blank, "correct", batch_size)
