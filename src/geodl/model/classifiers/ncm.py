"""NCM: the nearest mean of all samples, with semantic drift compensation (SDC)."""

from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.geometry import unit
from geodl.model.classifiers.nearest import NearestMean
from geodl.model.features import class_means, filled
from geodl.model.phase import Phase

PAIRS = 1 << 22
"""The maximum number of (sample, class) pairs whose weights are computed at a time."""


class Ncm(NearestMean):
    """Means of all samples, computed when a class is learned and later moved by the estimated drift."""

    name = "ncm"
    title = "NCM (SDC)"
    note = (
        "NCM (SDC): nearest class mean with semantic drift compensation; the class means are "
        "stored and moved along with the network."
    )
    meaning = "softmax of the network's scale times the cosines with the class means"
    preference = 2

    @classmethod
    def fit(cls, phase: Phase) -> Self:
        """Compute the means of this phase's classes and move those of the others."""
        now, before = phase.now, phase.before
        assert now is not None
        taken = class_means(now.pooled, now.labels, phase.classes)
        last = phase.previous.get(cls.name)
        if last is None:
            return cls(taken)
        assert isinstance(last, Ncm)
        moved = last.means if before is None else drift(last.means, before.pooled, now.pooled)
        return cls(filled(taken, F.pad(moved, (0, 0, 0, phase.classes - len(moved)))))


def drift(means: Tensor, old: Tensor, new: Tensor, width: float = 0.3) -> Tensor:
    """Move class means along with the network (semantic drift compensation, Yu et al. 2020).

    means: (C, d); old, new: (N, d) features of the same samples under the network before and after.
    Each mean moves by the samples' average displacement, weighted by a Gaussian of `width` in their
    old distance to it, all on the unit sphere (Eq. 8 and 9). Returns (C, d) unit rows in the dtype of
    `means`; unknown means (zeros) stay unknown.
    """
    if len(old) == 0:
        return means
    centers, before = unit(means), unit(old)
    displacement = unit(new) - before
    moved = []
    for chunk in torch.split(centers, max(1, PAIRS // len(before))):
        # |z - m|^2 = 2 - 2 <z, m> on the sphere. The softmax is the normalized Gaussian weight, and
        # unlike a quotient of sums it does not become 0 / 0 when every sample is many widths away.
        weights = torch.softmax((chunk @ before.T - 1) / width**2, dim=1)
        moved.append(chunk + weights @ displacement)
    known = (means != 0).any(dim=1, keepdim=True)
    return (unit(torch.cat(moved)) * known).to(means.dtype)
