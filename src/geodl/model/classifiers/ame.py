"""AME: the nearest mean of all training samples under the current network; an oracle."""

from typing import Self

from geodl.model.classifiers.nearest import NearestMean
from geodl.model.features import Features, class_means
from geodl.model.phase import Phase


class Ame(NearestMean):
    """Needs all old images, which a learner has discarded: it is fitted when it is evaluated."""

    name = "ame"
    title = "AME (oracle)"
    note = "AME needs data that a real learner no longer has: it is an oracle."
    oracle = True

    @classmethod
    def fit(cls, phase: Phase) -> Self | None:
        """Return None: it is never part of a model."""
        return None

    @classmethod
    def of(cls, features: Features, classes: int) -> Self:
        """Return the means of the features of all training images."""
        return cls(class_means(features.pooled, features.labels, classes))
