"""The base class of classifiers by the nearest class mean."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from geodl.config import RunConfig
from geodl.core.tensors import shaped
from geodl.model.classifiers.base import Classifier, Scorer, Tensors
from geodl.model.features import nearest_mean
from geodl.nets import Network

NO_SCALE = 10.0
"""The scale of cosines if the head has no learned scale."""


@dataclass(frozen=True)
class NearestMean(Classifier):
    """Predicts the class whose mean is nearest in cosine. means: (C, d), zeros for unknown ones."""

    means: Tensor

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.means)

    def scorer(self, network: Network) -> Scorer:
        """Return the cosines with the means as scores."""
        scale = getattr(network.head, "scale", torch.tensor(NO_SCALE)).detach().item()
        return Scorer(lambda features: nearest_mean(features.pooled, self.means), scale=scale)

    def without(self, row: int) -> Self:
        """Return the classifier without a class."""
        return type(self)(torch.cat([self.means[:row], self.means[row + 1 :]]))

    def tensors(self) -> Tensors:
        """Return the means."""
        return {"means": self.means}

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: RunConfig) -> Self:
        """Return the classifier of `tensors`."""
        return cls(shaped(tensors["means"], "means", None, None))
