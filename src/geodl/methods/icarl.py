"""iCaRL: distillation of logits, herding, nearest mean of exemplars (Rebuffi et al. 2017)."""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.config import Options
from geodl.data.batches import Batch
from geodl.methods.method import Losses, Method, register
from geodl.model.phase import Phase
from geodl.nets import Output


class IcarlOptions(Options):
    """Options of iCaRL."""

    defaults: ClassVar = {"distill": "lwf"}
    sigmoid: bool = False
    """The original loss: a sigmoid per class, with the old network's outputs as targets for the old classes (as published: lr 2, 70 epochs, lr_decay 0.2 at 0.7 and 0.9, weight_decay 2e-5)."""


@register
class Icarl(Method):
    """Cross-entropy + distillation; with a feature distillation the cosine head (the paper's iCaRL + GeoDL)."""

    name = "icarl"
    title = "iCaRL"
    summary = "the same training as lwf, evaluated by k-NME; with --distill geodesic the paper's iCaRL + GeoDL"
    paper = "Rebuffi, Kolesnikov, Sperl, Lampert: iCaRL, CVPR 2017"
    Options = IcarlOptions
    options: IcarlOptions

    @property
    def base_loss(self) -> str:  # type: ignore[override]
        """Cross-entropy, or the original's sigmoids."""
        return "mean sigmoid" if self.options.sigmoid else "cross-entropy"

    @property
    def head(self) -> Literal["cosine", "linear"]:  # type: ignore[override]
        """Linear as published; cosine with a feature distillation."""
        return "cosine" if self.distills_features else "linear"

    def loss(self, phase: Phase, batch: Batch, student: Output, teacher: Output | None) -> Losses:
        """Yield cross-entropy and distillation, or the original's binary cross-entropy (Alg. 3)."""
        if not self.options.sigmoid:
            yield from super().loss(phase, batch, student, teacher)
            return
        old = teacher.logits if teacher is not None and self.config.distill == "lwf" else None
        back = torch.isin(torch.arange(phase.old), phase.images.labels).nonzero().squeeze(1)
        yield "bce", phase.mean(sigmoid_losses(student.logits, batch.labels, old, back))
        if self.config.distill != "lwf":
            yield "distill", phase.distill(student, teacher)


def sigmoid_losses(
    logits: Tensor, labels: Tensor, old: Tensor | None, back: Tensor | None = None
) -> Tensor:
    """Return iCaRL's binary cross-entropy of each sample, (B,), as the mean over classes: the published lr of 2 is for that.

    logits: (B, C); labels: (B,), the targets. With ``old``: (B, C_old), the targets of old classes are sigmoid(old), except
    for those in ``back``, which have new images.
    """
    targets = truth = F.one_hot(labels, logits.shape[1]).to(logits)
    if old is not None:
        targets = torch.cat([old.sigmoid(), truth[:, old.shape[1] :]], dim=1)
        if back is not None:
            targets[:, back] = truth[:, back]
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
