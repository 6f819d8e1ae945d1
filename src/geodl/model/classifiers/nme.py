"""k-NME: the nearest mean of exemplars (iCaRL, Rebuffi et al. 2017)."""

from typing import Self

import torch

from geodl.model.classifiers.ncm import Ncm
from geodl.model.classifiers.nearest import NearestMean
from geodl.model.features import class_means, filled
from geodl.model.phase import Phase


class Nme(NearestMean):
    """Means of the k exemplars and, if mirroring keeps the class, of their mirrored copies."""

    name = "nme"
    title = "k-NME"
    meaning = "softmax of the network's scale times the cosines with the means of the exemplars"
    preference = 1

    @classmethod
    def fit(cls, phase: Phase) -> Self | None:
        """Compute the means of the exemplars; a class without exemplars has its NCM mean."""
        images = phase.kept.images if phase.kept else None
        if images is None:
            return None
        sides = (False, True) if phase.config.flip else (False,)
        views = [phase.read(images, mirror=side) for side in sides]
        pooled = torch.cat([view.pooled for view in views])
        labels = torch.cat([view.labels for view in views])
        means = class_means(pooled, labels, phase.classes)
        others = phase.classifier(Ncm)
        assert others is not None
        return cls(filled(means, others.means))
